//! The store on real files and real threads.

mod blocks;
mod bytes;
mod faults;
mod files;
mod mirrors;
mod ngram;
mod probe;
#[cfg(test)]
mod support;
