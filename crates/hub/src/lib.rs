//! Model repositories from a Hugging Face-compatible host into the local store.
//!
//! Owns the network, and the folder of models. Knows nothing of what is in a model: it must not open one.
//!
//! The idea to know first: nothing that a host says is believed. A listing at a commit promises paths, sizes and hashes;
//! paths are checked before anything is made of them, sizes bound every read, and a file gets its final name only after
//! its hash was found right. A pull may end anywhere and the next one goes on from there. Start at [`Hub::plan`] and
//! [`Hub::pull`].
#![forbid(unsafe_code)]

mod client;
mod digest;
mod error;
mod fetch;
mod glob;
mod held;
mod listing;
mod name;
mod part;
mod path;
mod pull;
mod retry;
mod select;
mod store;
mod tls;
mod token;
mod url;

use std::path::PathBuf;

pub use digest::FileHash;
pub use error::HubError;
pub use held::{Held, Unreadable};
pub use name::{ModelName, RepoName};
pub use path::RepoPath;
pub use pull::{Hub, Plan, Planned, Progress, Pulled, Request, Silent, Tuning};
pub use retry::Stop;
pub use select::Wanted;
pub use store::{Recorded, Snapshot, Store};
pub use token::Token;
pub use url::{DEFAULT_HOST, Host};

/// What `org/name` or `org/name:Q4_K_M` means in the store that the environment names: the folder of a safetensors
/// model, or the first file of a GGUF one.
///
/// # Errors
///
/// As [`Store::locate`]; each one says what to type.
pub fn locate(name: &str) -> Result<PathBuf, HubError> {
    Store::from_environment(&|name| std::env::var_os(name))?.locate(&name.parse()?)
}
