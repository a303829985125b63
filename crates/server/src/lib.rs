//! The HTTP server: `OpenAI`'s, Anthropic's and Ollama's dialects over one request and one answer.
//!
//! Owns what clients see: paths, limits, dialects, prompts, tools, structured output, and which model is loaded. It must
//! not compute, and no request names a file.
//!
//! The idea to know first: a dialect reads a request into an [`Ask`](chat::Ask) and writes what happens to its answer
//! ([`Event`](answerer::Event)s) in its own words; everything between is the same for all. Tokens are chosen, and split into
//! thought, text and calls, on the thread that computes; everything else happens on the threads of the server, which never
//! wait for a model to answer what is known. Start at [`serve`].
#![forbid(unsafe_code)]

mod access;
mod answerer;
mod anthropic;
mod body;
mod calls;
mod chat;
mod engine;
mod error;
mod fields;
mod generate;
mod grammar;
mod guard;
mod io;
mod listen;
mod load;
mod metrics;
mod models;
mod ollama;
mod openai;
mod openapi;
mod prompt;
mod room;
mod router;
mod schema;
mod splitter;
mod stream;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use chat::KeepAlive;
pub use listen::{Options, ServeError, Times, connection_bytes, serve};
pub use load::{LoadOptions, LoadProblem, load};
pub use models::{Loaded, ModelInfo, Shelf};

/// Seconds of a text like `5m`, `1h30m` or `90`; less than 0 is for ever.
pub fn duration_seconds(text: &str) -> Option<f64> {
    ollama::duration_seconds(text)
}
