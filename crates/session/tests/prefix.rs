//! Beginnings of prompts that are kept: rows that were read are not read again, and no bit tells.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/jobs.rs"]
mod jobs;
mod support;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use compute::backend::KvType;
use session::scheduler::{
    DiskOptions, JobError, PrefixCounters, Scheduler, SchedulerOptions, Serving, StartError,
    SubmitError,
};
use session::{BackendKind, EngineOptions, GRID};
use units::Bytes;

use jobs::{ANSWER, Gated, Logits, alone, fixtures, job, submit, text, usual, with_chooser};
use support::demo;

/// Enough for all that is kept here.
const PREFIX: Bytes = Bytes::mib(96);

fn caching(sequences: u32, prefix: Bytes) -> EngineOptions {
    let serving = Serving { sequences, queue: 4, prefix, requests: Bytes::ZERO };
    EngineOptions { serving, sweep: false, ..usual(1, 0) }
}

fn scheduler(path: &Path, options: EngineOptions, folder: Option<&Path>) -> Scheduler {
    let disk = folder.map(|folder| DiskOptions { folder: folder.to_owned(), quota: Bytes::gib(1) });
    let more = SchedulerOptions { disk, ..SchedulerOptions::default() };
    Scheduler::start(support::engine(path, options), more).unwrap()
}

/// An answer to a prompt that goes on from `cached` tokens is that of a run alone.
fn check(scheduler: &Scheduler, prompt: &[u32], cached: usize, expected: &[f32], case: &str) {
    let heard = submit(scheduler, prompt, ANSWER);
    let report = heard.finished();
    assert_eq!(report.cached, cached, "{case}");
    assert_eq!(report.prefill.tokens as usize, prompt.len() - cached, "{case}");
    assert!(*heard.logits.lock().unwrap() == *expected, "{case}");
}

/// A beginning that prompts share, and three of them.
fn family_of_prompts(vocab: u32) -> Vec<Vec<u32>> {
    let shared = text(vocab, 150, 0);
    let prompt = |i: usize| [shared.clone(), text(vocab, 60 + i, i)].concat();
    (1..4).map(prompt).collect()
}

fn alone_all(path: &Path, prompts: &[Vec<u32>]) -> (u32, Vec<Vec<f32>>) {
    let mut engine = support::engine(path, usual(1, 0));
    let expected = prompts.iter().map(|prompt| alone(&mut engine, prompt, ANSWER)).collect();
    (engine.network.config().vocab, expected)
}

fn vocab(path: &Path) -> u32 {
    session::OpenModel::open(path).unwrap().model.config.vocab
}

#[test]
fn prompts_that_begin_the_same_share_what_was_read() {
    let paths: Vec<PathBuf> = fixtures().into_iter().chain([demo()]).collect();
    for path in &paths {
        let prompts = family_of_prompts(vocab(path));
        let (_, expected) = alone_all(path, &prompts);
        // The late one takes its time.
        let all = [BackendKind::Cpu, BackendKind::Deferred];
        let backends = if *path == demo() { &all[..1] } else { &all };
        for &backend in backends {
            let case = format!("{} {backend:?}", path.display());
            let scheduler = scheduler(path, EngineOptions { backend, ..caching(2, PREFIX) }, None);
            let has_state = scheduler.plan().terms.iter().any(|t| t.name == "recurrent state");
            check(&scheduler, &prompts[0], 0, &expected[0], &case);
            // Where there is a state, the second prompt shows where others part from the first.
            let second = if has_state { 0 } else { 128 };
            check(&scheduler, &prompts[1], second, &expected[1], &case);
            check(&scheduler, &prompts[2], 128, &expected[2], &case);
            // Each may come again: all but its last rows are there.
            for (prompt, expected) in prompts.iter().zip(&expected) {
                check(&scheduler, prompt, (prompt.len() - 1) / GRID * GRID, expected, &case);
            }
            let PrefixCounters { lookups, hits, bytes, .. } = scheduler.stats().prefix;
            assert_eq!((lookups, hits), (6, if has_state { 4 } else { 5 }), "{case}");
            assert!(bytes > 0 && bytes <= PREFIX.0);
        }
    }
}

#[test]
fn a_hint_says_where_prompts_part() {
    for path in fixtures() {
        let prompts = family_of_prompts(vocab(&path));
        let (_, expected) = alone_all(&path, &prompts);
        let scheduler = scheduler(&path, caching(1, PREFIX), None);
        let (mut first, heard) = job(&prompts[0], ANSWER);
        first.shared = 150;
        scheduler.submit(first).unwrap();
        heard.finished();
        check(&scheduler, &prompts[1], 128, &expected[1], &path.display().to_string());
    }
}

#[test]
fn a_sequence_goes_on_where_it_is_even_without_a_cache() {
    for path in fixtures().into_iter().chain([demo()]) {
        let vocab = vocab(&path);
        let turns = [text(vocab, 100, 0), text(vocab, 180, 0), text(vocab, 300, 0)];
        let (_, expected) = alone_all(&path, &turns);
        let scheduler = scheduler(&path, caching(1, Bytes::ZERO), None);
        let case = path.display().to_string();
        for ((turn, expected), cached) in turns.iter().zip(&expected).zip([0, 64, 128]) {
            check(&scheduler, turn, cached, expected, &case);
        }
        // Another text between takes its place.
        let (other, expected_other) =
            (text(vocab, 90, 3), alone_all(&path, &[text(vocab, 90, 3)]).1);
        check(&scheduler, &other, 0, &expected_other[0], &case);
        check(&scheduler, &turns[2], 0, &expected[2], &case);
        let stats = scheduler.stats().prefix;
        assert_eq!((stats.held_rows, stats.memory_rows, stats.bytes), (192, 0, 0));
    }
}

#[test]
fn a_long_conversation_reads_what_is_new_and_at_most_a_grid_more() {
    const GENERATED: usize = 100;
    const NEW: usize = 64;
    let options = |sequences, prefix| EngineOptions {
        context: Some(3200),
        pass_rows: Some(512),
        slots: None,
        ..caching(sequences, prefix)
    };
    let prompt = text(vocab(&demo()), 3000 - GENERATED, 0);
    let scheduler = scheduler(&demo(), options(2, PREFIX), None);
    let first = submit(&scheduler, &prompt, GENERATED);
    let outcome = first.outcome();
    assert_eq!(outcome.tokens.len(), GENERATED);
    let next = [prompt, outcome.tokens, text(vocab(&demo()), NEW, 5)].concat();
    assert_eq!(next.len(), 3000 + NEW);
    let mut engine = support::engine(&demo(), options(1, Bytes::ZERO));
    let expected = alone(&mut engine, &next, ANSWER);
    // At the same time in both sequences: where it is, and from the cache.
    let both = [0, 1].map(|_| submit(&scheduler, &next, ANSWER));
    for heard in both {
        let report = heard.finished();
        let read = next.len() - report.cached;
        assert!(read <= GENERATED + NEW + GRID, "{read} rows were read again");
        assert_eq!(report.prefill.tokens as usize, read);
        assert!(*heard.logits.lock().unwrap() == expected);
    }
    let PrefixCounters { held_rows, memory_rows, .. } = scheduler.stats().prefix;
    assert!(held_rows > 2800 && memory_rows > 2800, "{held_rows} and {memory_rows}");
}

#[test]
fn a_cache_keeps_within_its_bytes() {
    for path in fixtures().into_iter().skip(1).take(1) {
        let vocab = vocab(&path);
        let prompts: Vec<_> = (0..4).map(|i| text(vocab, 140 + 30 * i, i)).collect();
        let (_, expected) = alone_all(&path, &prompts);
        let roomy = scheduler(&path, caching(1, PREFIX), None);
        prompts.iter().for_each(|prompt| _ = submit(&roomy, prompt, 1).finished());
        let all = roomy.stats().prefix.bytes;
        drop(roomy);
        for budget in [all / 8, all / 2] {
            let scheduler = scheduler(&path, caching(1, Bytes(budget)), None);
            for turn in 0..2 {
                for (prompt, expected) in prompts.iter().zip(&expected) {
                    let heard = submit(&scheduler, prompt, ANSWER);
                    heard.finished();
                    let case = format!("{} {budget} turn {turn}", path.display());
                    assert!(*heard.logits.lock().unwrap() == *expected, "{case}");
                    let PrefixCounters { bytes, .. } = scheduler.stats().prefix;
                    assert!(bytes <= budget, "{case}: {bytes}");
                }
            }
            let PrefixCounters { evicted_bytes, .. } = scheduler.stats().prefix;
            assert!(budget < all / 2 || evicted_bytes > 0);
        }
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Runs a prompt and has it written.
fn written(path: &Path, folder: &Path, prompt: &[u32]) {
    let scheduler = scheduler(path, caching(1, PREFIX), Some(folder));
    submit(&scheduler, prompt, 1).finished();
    scheduler.shutdown(Duration::from_hours(1));
}

#[test]
fn a_restart_goes_on_from_disk() {
    for path in fixtures().into_iter().chain([demo()]) {
        let folder = tempfile::tempdir().unwrap();
        let prompt = text(vocab(&path), 300, 0);
        let (_, expected) = alone_all(&path, std::slice::from_ref(&prompt));
        written(&path, folder.path(), &prompt);
        let after = scheduler(&path, caching(2, PREFIX), Some(folder.path()));
        let case = path.display().to_string();
        check(&after, &prompt, 256, &expected[0], &case);
        let PrefixCounters { disk_rows, memory_rows, disk_dropped, disk_files, disk_bytes, .. } =
            after.stats().prefix;
        assert_eq!((disk_rows, memory_rows, disk_dropped), (256, 0, 0), "{case}");
        let found = files(folder.path());
        assert_eq!(disk_files as usize, found.len());
        assert_eq!(disk_bytes, found.iter().map(|f| f.metadata().unwrap().len()).sum::<u64>());
        // Bits of other settings are others, and are kept under other names.
        drop(after);
        let floats = EngineOptions { kv: KvType::F32, ..caching(1, PREFIX) };
        let other = scheduler(&path, floats, Some(folder.path()));
        assert_eq!(submit(&other, &prompt, 1).finished().cached, 0);
    }
}

#[test]
fn what_is_wrong_on_disk_is_dropped_and_never_used() {
    static LINES: AtomicUsize = AtomicUsize::new(0);
    for path in [fixtures().remove(0), fixtures().remove(3)] {
        let folder = tempfile::tempdir().unwrap();
        let prompt = text(vocab(&path), 200, 0);
        let (_, expected) = alone_all(&path, std::slice::from_ref(&prompt));
        written(&path, folder.path(), &prompt);
        let originals: Vec<(PathBuf, Vec<u8>)> = files(folder.path())
            .into_iter()
            .map(|f| (f.clone(), std::fs::read(f).unwrap()))
            .collect();
        assert!(originals.len() >= 3);
        let damages: [fn(&mut Vec<u8>); 5] = [
            |bytes| bytes.truncate(0),
            |bytes| bytes.truncate(20),
            |bytes| bytes.truncate(bytes.len() - 1),
            |bytes| *bytes.last_mut().unwrap() ^= 1,
            |bytes| bytes[16] ^= 1,
        ];
        for (i, damage) in damages.iter().enumerate() {
            for (at, (file, bytes)) in originals.iter().enumerate() {
                for (file, bytes) in &originals {
                    std::fs::write(file, bytes).unwrap();
                }
                let mut damaged = bytes.clone();
                damage(&mut damaged);
                std::fs::write(file, damaged).unwrap();
                let before = LINES.load(Ordering::SeqCst);
                let disk = DiskOptions { folder: folder.path().to_owned(), quota: Bytes::gib(1) };
                let more = SchedulerOptions {
                    disk: Some(disk),
                    notice: Some(|line| {
                        assert!(line.contains("dropped"), "{line}");
                        LINES.fetch_add(1, Ordering::SeqCst);
                    }),
                    ..SchedulerOptions::default()
                };
                let engine = support::engine(&path, caching(1, PREFIX));
                let scheduler = Scheduler::start(engine, more).unwrap();
                let heard = submit(&scheduler, &prompt, ANSWER);
                let report = heard.finished();
                let case = format!("{} damage {i} of file {at}", path.display());
                assert!(report.cached < 192, "{case}");
                assert!(*heard.logits.lock().unwrap() == expected[0], "{case}");
                assert_eq!(scheduler.stats().prefix.disk_dropped, 1, "{case}");
                assert_eq!(LINES.load(Ordering::SeqCst) - before, 1, "{case}");
            }
        }
    }
}

/// A notice is told on the engine's thread, so one that panics is an engine that does.
#[test]
fn an_engine_that_panics_tells_everybody_why_and_takes_nothing_more() {
    let path = fixtures().remove(0);
    let folder = tempfile::tempdir().unwrap();
    let prompt = text(vocab(&path), 200, 0);
    written(&path, folder.path(), &prompt);
    files(folder.path()).iter().for_each(|file| std::fs::write(file, "damaged").unwrap());
    let disk = DiskOptions { folder: folder.path().to_owned(), quota: Bytes::gib(1) };
    let more = SchedulerOptions {
        disk: Some(disk),
        notice: Some(|_| panic!("a bug of the engine")),
        ..SchedulerOptions::default()
    };
    let engine = support::engine(&path, caching(2, PREFIX));
    let scheduler = Scheduler::start(engine, more).unwrap();
    assert_eq!(scheduler.stopped(), None);
    // One runs, one meets the bug on its way to the other sequence, one waits.
    let (open, gate) = std::sync::mpsc::channel();
    let other = text(vocab(&path), 20, 1);
    let gated = Gated { gate, chosen: 0 };
    let (running, running_heard) = with_chooser(&other, 100, gated, Logits::default());
    scheduler.submit(running).unwrap();
    running_heard.await_tokens(1);
    let others = [&prompt, &other].map(|prompt| submit(&scheduler, prompt, ANSWER));
    drop(open);
    for heard in [&running_heard].into_iter().chain(&others) {
        let error = heard.outcome().end.unwrap_err();
        assert!(
            matches!(&error, JobError::EngineStopped { message } if message == "a bug of the engine"),
            "{error}"
        );
    }
    let message = "a bug of the engine".to_owned();
    assert_eq!(scheduler.stopped().as_ref(), Some(&message));
    let refused = scheduler.submit(job(&other, 1).0).unwrap_err();
    assert_eq!(refused, SubmitError::EngineStopped { message });
    let stats = scheduler.stats();
    assert_eq!((stats.failed, stats.running, stats.queued), (3, 0, 0));
}

#[test]
fn a_quota_holds_and_other_files_are_left_alone() {
    let path = fixtures().remove(0);
    let folder = tempfile::tempdir().unwrap();
    let foreign = folder.path().join("notes.rows");
    std::fs::write(&foreign, "mine").unwrap();
    let vocab = vocab(&path);
    written(&path, folder.path(), &text(vocab, 70, 0));
    let one = files(folder.path()).iter().map(|f| f.metadata().unwrap().len()).max().unwrap();
    let quota = Bytes(4 * one);
    let disk = Some(DiskOptions { folder: folder.path().to_owned(), quota });
    let more = SchedulerOptions { disk, ..SchedulerOptions::default() };
    let scheduler = Scheduler::start(support::engine(&path, caching(1, PREFIX)), more).unwrap();
    for i in 1..5 {
        submit(&scheduler, &text(vocab, 150, i), 1).finished();
    }
    scheduler.shutdown(Duration::from_hours(1));
    assert_eq!(std::fs::read(&foreign).unwrap(), b"mine");
    let ours = files(folder.path()).into_iter().filter(|file| *file != foreign);
    let bytes: u64 = ours.map(|file| file.metadata().unwrap().len()).sum();
    assert!(bytes <= quota.0 && bytes > 2 * one, "{bytes} of {quota}");
}

#[test]
fn a_disk_that_fails_costs_nothing_but_what_it_would_have_kept() {
    let path = fixtures().remove(0);
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    let disk = Some(DiskOptions { folder: inner.clone(), quota: Bytes::gib(1) });
    let more = || SchedulerOptions { disk: disk.clone(), ..SchedulerOptions::default() };
    let scheduler = Scheduler::start(support::engine(&path, caching(1, PREFIX)), more()).unwrap();
    std::fs::remove_dir(&inner).unwrap();
    let prompt = text(vocab(&path), 200, 0);
    assert_eq!(submit(&scheduler, &prompt, 1).finished().cached, 0);
    assert_eq!(submit(&scheduler, &prompt, 1).finished().cached, 192);
    // Whenever the writing thread came to it.
    while scheduler.stats().prefix.disk_failed == 0 {
        submit(&scheduler, &prompt, 1).finished();
    }
    assert_eq!(scheduler.stats().prefix.disk_written_bytes, 0);
    scheduler.shutdown(Duration::from_hours(1));
    // A file where the folder should be, and a disk without memory.
    std::fs::write(&inner, "").unwrap();
    let error = Scheduler::start(support::engine(&path, caching(1, PREFIX)), more()).err().unwrap();
    assert!(matches!(error, StartError::Folder { .. }), "{error}");
    let none = support::engine(&path, caching(1, Bytes::ZERO));
    assert!(matches!(Scheduler::start(none, more()).err(), Some(StartError::DiskWithoutMemory)));
}

#[cfg(unix)]
#[test]
fn what_people_have_said_is_nobody_elses_to_read() {
    use std::os::unix::fs::PermissionsExt;
    let path = fixtures().remove(0);
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("inner");
    written(&path, &inner, &text(vocab(&path), 70, 0));
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&inner), 0o700);
    let files = files(&inner);
    assert_eq!(files.iter().map(|file| mode(file)).collect::<Vec<_>>(), [0o600]);
}

/// Names the folder that the child below writes to.
const CHILD: &str = "SAKIA_TEST_PREFIX_FOLDER";

/// Prompts that the child writes.
fn child_prompts(path: &Path) -> Vec<Vec<u32>> {
    (0..40).map(|i| text(vocab(path), 330, i)).collect()
}

#[test]
fn child_writes_until_it_is_killed() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let path = fixtures().remove(1);
    let scheduler = scheduler(&path, caching(1, PREFIX), Some(Path::new(&folder)));
    for prompt in child_prompts(&path) {
        submit(&scheduler, &prompt, 1).finished();
    }
    scheduler.shutdown(Duration::from_hours(1));
}

#[test]
fn a_killed_writer_never_breaks_a_start() {
    let path = fixtures().remove(1);
    let folder = tempfile::tempdir().unwrap();
    let prompts = child_prompts(&path);
    let (_, expected) = alone_all(&path, &prompts[..1]);
    for kill_after in [1, 4, 9] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_writes_until_it_is_killed", "--nocapture"])
            .env(CHILD, folder.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let before = files(folder.path()).len();
        while files(folder.path()).len() < before + kill_after
            && child.try_wait().unwrap().is_none()
        {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let scheduler = scheduler(&path, caching(1, PREFIX), Some(folder.path()));
        let heard = submit(&scheduler, &prompts[0], ANSWER);
        heard.finished();
        assert!(*heard.logits.lock().unwrap() == expected[0]);
        let PrefixCounters { disk_dropped, .. } = scheduler.stats().prefix;
        assert_eq!(disk_dropped, 0, "what has a name is complete");
        drop(scheduler);
        let left = files(folder.path());
        assert!(left.iter().all(|f| f.extension().unwrap() != "writing"), "{left:?}");
    }
}
