//! The chores whose results tests use too. All others are in the program.

pub mod synth;
