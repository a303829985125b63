//! How fast a disk delivers records of the size of an expert: `MODEL=big.gguf cargo run --release -p expert-store
//! --example read_rate`. Reads three pieces a record, as a GGUF has them, from random places.
#![allow(unsafe_code, reason = "slots are raw memory")]
#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use std::ptr::NonNull;
use std::time::Instant;

use checkpoint::{DIRECT_ALIGN, Piece, Pieces};
use expert_store::{Destination, DirectMode, Priority, ReadRequest, Store, StoreOptions};
use units::{ExpertKey, FileIndex};

/// Records in flight: the misses of a layer.
const IN_FLIGHT: usize = 8;
/// Read for each line of the table.
const TOTAL_BYTES: u64 = 1 << 30;

/// Pieces of `bytes` each at random places of a file of `size` bytes.
fn record(state: &mut u64, size: u64, n_pieces: u64, bytes: u64) -> Pieces {
    let mut pieces = Pieces::default();
    let mut end = 0;
    for _ in 0..n_pieces {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let offset = (*state >> 20) % (size - bytes) / 32 * 32;
        let place = end + offset % DIRECT_ALIGN;
        pieces.push(Piece { file: FileIndex(0), offset, bytes, place, blocks: None });
        end = (place + bytes).next_multiple_of(DIRECT_ALIGN);
    }
    pieces
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::var_os("MODEL").ok_or("set MODEL to a large file")?;
    println!("pieces      bytes  threads  direct    MB/s  first ms  device/payload");
    let mut state = 1;
    for (n_pieces, bytes) in [(3, 884_736), (1, 2_654_208), (9, 98_304)] {
        let stride =
            (n_pieces * (bytes + 2 * DIRECT_ALIGN)).next_multiple_of(DIRECT_ALIGN) as usize;
        let mut memory = vec![0u8; stride * IN_FLIGHT + DIRECT_ALIGN as usize];
        let shift = memory.as_ptr().align_offset(DIRECT_ALIGN as usize);
        for (threads, direct) in [1, 2, 4, 8, 16]
            .map(|threads| (threads, DirectMode::Auto))
            .into_iter()
            .chain([(4, DirectMode::Off)])
        {
            let options = StoreOptions { threads, direct, faults: None };
            let store = Store::open(&[path.clone().into()], options)?;
            let size = store.files()[0].bytes;
            let (since, mut first_ms, mut layers) = (Instant::now(), 0.0, 0);
            while store.counters().payload_bytes < TOTAL_BYTES {
                let layer = Instant::now();
                for (i, slot) in memory[shift..].chunks_exact_mut(stride).enumerate() {
                    let (base, len) = (NonNull::from(&mut *slot).cast(), slot.len());
                    // SAFETY: `memory` outlives the reads, which are awaited below, before it is used again.
                    let destination = unsafe { Destination::new(base, len) };
                    let pieces = record(&mut state, size, n_pieces, bytes);
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
            let counters = store.counters();
            let rate = counters.payload_bytes as f64 / 1e6 / since.elapsed().as_secs_f64();
            let extra = counters.device_bytes as f64 / counters.payload_bytes as f64;
            println!(
                "{n_pieces:6} {bytes:10} {threads:8} {:>7} {rate:7.0} {:9.2} {extra:15.3}",
                store.direct(),
                first_ms / f64::from(layers),
            );
        }
    }
    Ok(())
}
