//! The right bytes at the right places, and nothing beside them.

use expert_store::{DirectMode, Priority, StoreOptions};
use units::FileIndex;

use crate::support::{
    BLANK, Load, MODES, PAGE, Random, Slot, TestFiles, options, random_loads, readers, resident,
};

#[test]
fn every_byte_arrives_wherever_its_piece_begins() {
    let files = TestFiles::new(&[300_000, 4096 * 20, 4097, 1]);
    for (seed, direct) in (0..6).flat_map(|seed| MODES.map(|mode| (seed, mode))) {
        for (reader, threads) in readers().into_iter().flat_map(|r| [(r, 1), (r, 4)]) {
            // Whole pieces, and parts of some pages.
            let part_bytes = if seed % 2 == 0 { u64::MAX } else { 10_000 };
            let store =
                files.store(StoreOptions { part_bytes, reader, ..options(direct, threads) });
            let loads = random_loads(&files, 24, seed);
            for (i, load) in loads.iter().enumerate() {
                store.submit(load.request(), Priority::ALL[i % 3]);
            }
            for left in (0..loads.len()).rev() {
                let completion = store.wait_any();
                let load = &loads[completion.key.expert.get()];
                assert_eq!(completion.result.unwrap(), load.payload_bytes());
                assert!(load.is_exact(&files), "seed {seed} {direct:?} {:?}", load.pieces);
                assert_eq!(store.outstanding(), left);
            }
            assert!(store.try_any().is_none());
        }
    }
}

#[test]
fn bytes_outside_of_the_widened_pieces_are_not_touched() {
    let files = TestFiles::new(&[100_000]);
    for direct in MODES {
        let store = files.store(options(direct, 2));
        let mut load = Load::new(0, &[(0, 5000, 3000), (0, 50, 20)]);
        load.slot = Slot::new(6 * PAGE as usize);
        store.submit(load.request(), Priority::Demand);
        store.wait_any().result.unwrap();
        assert!(load.is_exact(&files));
        // 5000..8000 lies in the second page of the file, 50..70 in the first: one page of the slot each.
        assert!(load.slot.bytes()[2 * PAGE as usize..].iter().all(|&b| b == BLANK));
    }
}

#[test]
fn memory_that_is_not_aligned_gets_the_same_bytes_through_staging() {
    let files = TestFiles::new(&[3_000_000]);
    for direct in MODES {
        let store = files.store(options(direct, 2));
        let mut load = Load::new(0, &[(0, 77, 2_500_000), (0, 4096, 4096)]);
        load.slot = Slot::shifted(load.slot.bytes().len(), 24);
        store.submit(load.request(), Priority::Demand);
        store.wait_any().result.unwrap();
        assert!(load.is_exact(&files));
        let bounced = if store.direct() { 2 } else { 0 };
        assert_eq!(store.counters().demand.bounced, bounced);
    }
}

#[test]
fn prepared_slots_get_the_same_bytes_again_and_again() {
    let files = TestFiles::new(&[6_000_000, 90_000]);
    for (reader, direct) in readers().into_iter().flat_map(|r| MODES.map(|mode| (r, mode))) {
        let mut loads = random_loads(&files, 12, 5);
        loads.push(Load::new(12, &[(0, 123, 3_000_001), (0, 4_000_000, 1_500_000)]));
        let store = files.store(StoreOptions { reader, ..options(direct, 3) });
        // Of some slots nothing is said: reads into those are as usual.
        store.prepare_slots(loads.iter().skip(3).map(|load| load.slot.memory()).collect());
        for round in 0..4 {
            for load in &mut loads {
                load.slot.fill(round);
            }
            for load in &loads {
                store.submit(load.request(), Priority::Demand);
            }
            for _ in &loads {
                store.wait_any().result.unwrap();
            }
            assert!(loads.iter().all(|load| load.is_exact(&files)), "{reader:?} {direct:?}");
        }
        drop(store);
    }
}

#[test]
fn a_long_piece_arrives_whole_or_in_parts() {
    let files = TestFiles::new(&[6_000_000]);
    for (reader, direct) in readers().into_iter().flat_map(|r| MODES.map(|mode| (r, mode))) {
        for (part_bytes, parts) in [(u64::MAX, 1), (1 << 20, 5), (100_000, 57)] {
            let store = files.store(StoreOptions { part_bytes, reader, ..options(direct, 3) });
            let load = Load::new(0, &[(0, 123, 5_700_001)]);
            store.submit(load.request(), Priority::Demand);
            assert_eq!(store.wait_any().result.unwrap(), 5_700_001);
            assert!(load.is_exact(&files), "{reader:?} {direct:?} {part_bytes}");
            let reads = store.counters().demand.reads;
            assert!(reads >= parts, "{reads} reads for {parts} parts");
        }
    }
}

#[test]
fn a_slot_without_slack_at_its_end_gets_the_same_bytes() {
    let files = TestFiles::new(&[30_000]);
    for direct in MODES {
        let store = files.store(options(direct, 1));
        let mut load = Load::new(0, &[(0, 100, 5000)]);
        load.slot = Slot::new(5100);
        store.submit(load.request(), Priority::Demand);
        store.wait_any().result.unwrap();
        assert!(load.is_exact(&files));
    }
}

#[test]
fn a_tensor_arrives_from_any_offset_into_any_memory() {
    let files = TestFiles::new(&[9_500_001]);
    for (direct, threads) in MODES.into_iter().zip([3, 1]) {
        let store = files.store(options(direct, threads));
        let mut random = Random(7);
        for case in 0..40 {
            let len =
                [0, 1, 4096, 9_500_001, random.below(9_000_000), random.below(9000)][case % 6];
            let offset = random.below(9_500_001 - len + 1);
            let offset = if case % 4 == 0 { offset - offset % PAGE } else { offset };
            let mut out = vec![BLANK; len as usize];
            store.read_blocking(FileIndex(0), offset, &mut out).unwrap();
            let expected = &files.contents[0][offset as usize..(offset + len) as usize];
            assert!(out == expected, "{len} bytes at {offset}");
        }
        assert_eq!(store.counters().payload_bytes, 0, "resident bytes are not expert bytes");
    }
}

#[test]
fn many_tensors_arrive_and_progress_adds_up() {
    let files = TestFiles::new(&[6_000_000]);
    for direct in MODES {
        let store = files.store(options(direct, 4));
        let sizes: [usize; 5] = [100, 5_000_000, 4096, 900_000, 1];
        let slots = sizes.map(Slot::new);
        let reads = slots.iter().enumerate().map(|(i, slot)| resident(i as u64 * 1111, slot));
        let mut told = 0;
        store.read_many(reads, &mut |bytes| told += bytes).unwrap();
        assert_eq!(told, sizes.iter().sum::<usize>() as u64);
        assert_eq!(store.counters().resident.payload_bytes, told);
        for (i, slot) in slots.iter().enumerate() {
            let start = i * 1111;
            assert!(slot.bytes() == &files.contents[0][start..start + sizes[i]]);
        }
    }
}

#[test]
fn a_request_without_bytes_completes() {
    let files = TestFiles::new(&[10]);
    let store = files.store(options(DirectMode::Auto, 1));
    let (nothing, empty) = (Load::new(0, &[]), Load::new(1, &[(0, 10, 0)]));
    store.submit(nothing.request(), Priority::Demand);
    assert_eq!(store.wait_any().result.unwrap(), 0);
    store.submit(empty.request(), Priority::Demand);
    assert_eq!(store.wait_any().result.unwrap(), 0);
    assert_eq!(store.counters().demand.reads, 0);
}

#[test]
fn counters_tell_payload_from_what_the_disk_delivered() {
    let files = TestFiles::new(&[100_000]);
    for direct in MODES {
        let store = files.store(options(direct, 2));
        let before = store.counters();
        let load = Load::new(0, &[(0, 5000, 3000), (0, 99_990, 10)]);
        store.submit(load.request(), Priority::Speculative);
        store.wait_any().result.unwrap();
        let counters = store.counters().minus(&before);
        assert_eq!(counters.payload_bytes, 3010);
        // Direct: one whole page, and the file's last page up to its end at 100000.
        let device = if store.direct() { 4096 + (100_000 - 24 * 4096) } else { 3010 };
        assert_eq!(counters.device_bytes, device);
        let traffic = counters.speculative;
        assert_eq!((traffic.requests, traffic.reads, traffic.errors), (1, 2, 0));
        assert_eq!(counters.plus(&before), store.counters());
    }
}

#[test]
#[should_panic(expected = "pieces overlap or exceed")]
fn a_destination_that_is_too_short_is_refused() {
    let files = TestFiles::new(&[10_000]);
    let store = files.store(options(DirectMode::Off, 1));
    let mut load = Load::new(0, &[(0, 0, 8000)]);
    load.slot = Slot::new(7999);
    store.submit(load.request(), Priority::Demand);
}

#[test]
fn nothing_is_written_after_the_store_is_gone() {
    let files = TestFiles::new(&[2_000_000]);
    for round in 0..20 {
        let store = files.store(options(DirectMode::Auto, 4));
        let mut loads = random_loads(&files, 40, round);
        for load in &loads {
            store.submit(load.request(), Priority::Demand);
        }
        drop(store);
        for load in &mut loads {
            load.slot.fill(BLANK);
        }
        std::thread::yield_now();
        for load in &loads {
            assert!(load.slot.bytes().iter().all(|&b| b == BLANK));
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_stays_in_the_page_cache() {
    use crate::support::{cached_pages, forget};

    let files = TestFiles::new(&[20_000_000]);
    let path = &files.paths[0];
    forget(path);
    if cached_pages(path) > 0 {
        eprintln!("skipped: {} is on a file system that lives in memory", path.display());
        return;
    }
    std::fs::read(path).unwrap();
    assert!(cached_pages(path) > 4000, "the count must see what an ordinary read leaves");
    forget(path);
    for direct in MODES {
        let store = files.store(options(direct, 1));
        let loads = random_loads(&files, 20, 3);
        for load in &loads {
            store.submit(load.request(), Priority::Demand);
        }
        for _ in &loads {
            store.wait_any().result.unwrap();
        }
        store.read_blocking(FileIndex(0), 5, &mut vec![0; 9_000_000]).unwrap();
        assert_eq!(cached_pages(path), 0, "{direct:?}");
    }
}
