//! The network: embeds tokens, runs the layers, gives logits.
//!
//! This crate only *records* operations on a backend and moves experts between the pool, the store and the
//! backend. It computes nothing itself and owns no activation.
//!
//! Start at [`Network::forward`]; a layer is sequenced in `layer.rs`, what it takes from the residual and gives back
//! in `streams.rs`, its two mixers in `attention.rs` and `delta_net.rs`, its experts in `moe.rs` (what runs) and
//! `experts.rs` (which bytes move), guesses of the next layer's in `lookahead.rs`, rows of an n-gram table in `ngram.rs`,
//! a block that guesses tokens ahead in `network/draft.rs`, how guesses are run and taken back in `network/verify.rs`,
//! what a sequence holds of a prompt as bytes in `network/prefix.rs`.

mod attention;
mod delta_net;
mod experts;
mod layer;
mod load;
mod lookahead;
mod memory;
mod moe;
mod network;
mod ngram;
mod routes;
mod streams;

pub use experts::{AheadCounters, ExpertCounters, ExpertStream, hot_set_bytes, sweep_bytes};
pub use load::LoadError;
pub use lookahead::correction::{Correction, LayerCorrection};
pub use lookahead::record::{TapSink, Tapped};
pub use lookahead::{Lookahead, LookaheadCounters};
pub use memory::{
    NamedBytes, draft_kv_bytes_per_token, draft_scratch, draft_weights, kv_bytes_per_token,
    late_draft, lookahead_bytes, recurrent_bytes, resident_terms, scratch_terms, tap_bytes,
    thread_bytes, token_bytes, verify_terms,
};
pub use network::draft::{DraftFrom, LATE_ROWS};
pub use network::{ForwardError, GoOn, LogitRows, Network, NetworkOptions};
pub use routes::{LoggedPass, RouteLog};
