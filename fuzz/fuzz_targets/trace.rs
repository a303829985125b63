//! Any bytes as a record of routing, as they are and under a checksum that fits: an error or a trace that is written as it
//! was read and that every policy can replay, never a panic.
#![no_main]

use checkpoint::pack::Checksum;
use libfuzzer_sys::fuzz_target;
use session::{ReplayPolicy, Trace, replay};
use slot_pool::PolicyKind;
use units::LayerIndex;

/// Replays of more look-ups than this take too long.
const LOOKUPS: u64 = 20_000;

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    let mut sealed = bytes.to_vec();
    sealed.extend_from_slice(&Checksum::of(bytes).to_le_bytes());
    read(&sealed);
});

fn read(bytes: &[u8]) {
    let Ok(trace) = Trace::decode(bytes) else { return };
    assert_eq!(trace.encode(), bytes, "what was read is what is written");
    let [layers, experts, top_k] = trace.shape();
    let tokens: u64 = trace.tokens().iter().sum();
    let uses: u64 = trace.uses().iter().map(|uses| u64::from(*uses)).sum();
    assert_eq!(uses, tokens * u64::from(layers) * u64::from(top_k), "every choice is a use");
    let rows: u64 = trace.passes().map(|(pass, _)| u64::from(pass.rows)).sum();
    assert_eq!(rows, tokens, "passes hold the tokens");
    let _ = trace.record_bytes(LayerIndex(layers - 1));
    // A replay looks at every expert of every layer of every pass.
    if uses > LOOKUPS || u64::from(layers) * u64::from(experts) > LOOKUPS {
        return;
    }
    let online = PolicyKind::ALL.map(ReplayPolicy::Online);
    for slots in [top_k + 1, layers * experts / 2, layers * experts] {
        for policy in online.into_iter().chain([ReplayPolicy::Belady]) {
            let Ok(found) = replay(&trace, slots, policy) else { continue };
            for tally in [found.prefill, found.decode] {
                assert!(tally.misses <= tally.lookups);
            }
            assert_eq!(found.prefill.tokens + found.decode.tokens, tokens);
        }
    }
}
