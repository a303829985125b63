//! The store on real files and real threads.

mod bytes;
mod faults;
mod files;
#[cfg(test)]
mod support;
