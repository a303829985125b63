//! Checkpoints as files: well-formed ones of every family and layout, malformed ones, and everything in between.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::disallowed_methods, reason = "test files are small and read whole")]

mod bad_files;
mod containers;
mod families;
mod folder_mutations;
mod folders;
mod models;
mod mutations;
mod packs;
mod records;
mod scaled_table;
mod support;
mod texts;
