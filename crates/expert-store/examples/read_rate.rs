//! How fast a disk delivers records of the size of an expert: `MODEL=big.gguf cargo run --release -p expert-store
//! --example read_rate`. Every line is the median of several rounds, in which the cases take turns.
#![allow(unsafe_code, reason = "slots are raw memory")]
#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::path::PathBuf;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use checkpoint::{DIRECT_ALIGN, Piece, Pieces};
use expert_store::{
    Destination, DirectMode, Priority, ReadRequest, ReaderKind, SlotMemory, Store, StoreOptions,
};
use units::{ExpertKey, FileIndex};

/// Read for each case and round.
const TURN_BYTES: u64 = 128 << 20;
const ROUNDS: usize = 5;

/// A way to lay out and to read records.
struct Case {
    name: String,
    /// Pieces of a record, and bytes of each.
    pieces: (u64, u64),
    /// Whether they lie one behind the other in the file.
    touching: bool,
    /// Records in flight: the misses of a layer.
    in_flight: usize,
    options: StoreOptions,
    /// Whether the store is told where the slots are.
    prepared: bool,
}

/// What a turn took: MB/s, milliseconds to the first record of a layer, CPU seconds a GB.
type Turn = [f64; 3];

fn cases() -> Vec<Case> {
    let case = |name: &str, pieces, touching, in_flight, threads, part_bytes| {
        let options = StoreOptions { threads, part_bytes, ..StoreOptions::default() };
        Case { name: name.to_owned(), pieces, touching, in_flight, options, prepared: false }
    };
    let mut cases = Vec::new();
    for (n_pieces, bytes) in [(3, 884_736), (1, 2_654_208), (9, 98_304)] {
        for threads in [1, 2, 4, 8, 16] {
            let name = format!("{n_pieces} x {bytes}, {threads} threads");
            cases.push(case(&name, (n_pieces, bytes), false, 8, threads, u64::MAX));
        }
    }
    let mut buffered = case("3 x 884736, 4 threads, buffered", (3, 884_736), false, 8, 4, u64::MAX);
    buffered.options.direct = DirectMode::Off;
    cases.push(buffered);
    for (n, bytes) in [(3, 884_736), (3, 98_304), (3, 16_384)] {
        cases.push(case(&format!("touching, {n} x {bytes}"), (n, bytes), true, 8, 4, u64::MAX));
        let one = (1, n * bytes);
        cases.push(case(&format!("touching, as one of {}", one.1), one, false, 8, 4, u64::MAX));
    }
    for in_flight in [1, 2, 8] {
        for part_bytes in [u64::MAX, 1 << 20, 512 << 10, 256 << 10] {
            let part = if part_bytes == u64::MAX { 0 } else { part_bytes };
            let name = format!("{in_flight} in flight of 2654208, parts of {part}");
            cases.push(case(&name, (1, 2_654_208), false, in_flight, 4, part_bytes));
        }
    }
    for (pieces, threads) in [((3, 884_736), 4), ((1, 2_654_208), 4), ((1, 2_654_208), 1)] {
        for (word, reader, prepared) in [
            ("by pread", ReaderKind::Pread, false),
            ("by io_uring", ReaderKind::IoUring, false),
            ("by io_uring, prepared", ReaderKind::IoUring, true),
        ] {
            let name = format!("{} x {}, {threads} threads {word}", pieces.0, pieces.1);
            let mut case = case(&name, pieces, false, 8, threads, u64::MAX);
            (case.options.reader, case.prepared) = (reader, prepared);
            cases.push(case);
        }
    }
    let wanted = std::env::var("CASE").unwrap_or_default();
    cases.retain(|case| case.name.contains(&wanted));
    cases
}

/// Pieces at random places of a file of `size` bytes.
fn record(state: &mut u64, size: u64, case: &Case) -> Pieces {
    let (n_pieces, bytes) = case.pieces;
    let (mut pieces, mut end, mut next) = (Pieces::default(), 0, None);
    for _ in 0..n_pieces {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let anywhere = (*state >> 20) % (size - n_pieces * bytes) / 32 * 32;
        let offset = next.filter(|_| case.touching).unwrap_or(anywhere);
        next = Some(offset + bytes);
        let place = end + offset % DIRECT_ALIGN;
        pieces.push(Piece { file: FileIndex(0), offset, bytes, place, blocks: None });
        end = (place + bytes).next_multiple_of(DIRECT_ALIGN);
    }
    pieces
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn turn(path: &PathBuf, case: &Case, state: &mut u64) -> Result<Turn, Box<dyn std::error::Error>> {
    let (n_pieces, bytes) = case.pieces;
    let stride = (n_pieces * (bytes + 2 * DIRECT_ALIGN)).next_multiple_of(DIRECT_ALIGN) as usize;
    let mut memory = vec![1u8; stride * case.in_flight + DIRECT_ALIGN as usize];
    let shift = memory.as_ptr().align_offset(DIRECT_ALIGN as usize);
    let store = Store::open(std::slice::from_ref(path), case.options.clone())?;
    let size = store.files()[0].bytes;
    if case.prepared {
        let slots = memory[shift..].chunks_exact(stride).take(case.in_flight);
        // SAFETY: `memory` is dropped after the store.
        let slots = slots.map(|s| unsafe { SlotMemory::new(NonNull::from(s).cast(), s.len()) });
        store.prepare_slots(slots.collect());
    }
    let (since, cpu, mut first_ms, mut layers) = (Instant::now(), cpu_time(), 0.0, 0);
    while store.counters().payload_bytes < TURN_BYTES {
        let layer = Instant::now();
        for (i, slot) in memory[shift..].chunks_exact_mut(stride).take(case.in_flight).enumerate() {
            let (base, len) = (NonNull::from(&mut *slot).cast(), slot.len());
            // SAFETY: `memory` outlives the reads, which are awaited below, before it is used again.
            let destination = unsafe { Destination::new(base, len) };
            let pieces = record(state, size, case);
            let key = ExpertKey::new(0, i as u32);
            store.submit(ReadRequest { key, pieces, destination }, Priority::Demand);
        }
        store.wait_any().result?;
        first_ms += layer.elapsed().as_secs_f64() * 1e3;
        layers += 1;
        while store.outstanding() > 0 {
            store.wait_any().result?;
        }
    }
    let read = store.counters().payload_bytes as f64;
    let cpu = cpu_time().saturating_sub(cpu).as_secs_f64();
    Ok([read / 1e6 / since.elapsed().as_secs_f64(), first_ms / f64::from(layers), cpu / read * 1e9])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(std::env::var_os("MODEL").ok_or("set MODEL to a large file")?);
    let (cases, mut state) = (cases(), 1);
    let mut turns: Vec<Vec<Turn>> = cases.iter().map(|_| Vec::new()).collect();
    for _ in 0..ROUNDS {
        for (case, turns) in cases.iter().zip(&mut turns) {
            turns.push(turn(&path, case, &mut state)?);
        }
    }
    println!("{:48}   MB/s (least to most)  first ms  CPU s/GB", "case");
    for (case, turns) in cases.iter().zip(&mut turns) {
        let mut column = |i: usize| {
            turns.sort_by(|a, b| a[i].total_cmp(&b[i]));
            [turns[0][i], turns[ROUNDS / 2][i], turns[ROUNDS - 1][i]]
        };
        let ([least, rate, most], [_, first, _], [_, cpu, _]) = (column(0), column(1), column(2));
        let name = &case.name;
        println!("{name:48} {rate:6.0} ({least:5.0} to {most:5.0}) {first:9.2} {cpu:9.3}");
    }
    Ok(())
}
