//! The store on real files and real threads.

mod blocks;
mod bytes;
mod faults;
mod files;
#[cfg(test)]
mod support;
