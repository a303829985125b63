//! Threads that wait for small jobs.
//!
//! A job is a number of tasks. Threads claim tasks one at a time from a shared counter, so a thread that the
//! system has put aside holds up nobody for more than the one task that it had begun; a thread that never woke
//! up holds up nobody at all. The caller works too, as worker 0: with one thread nothing is ever shared.
//!
//! Between jobs a worker spins for [`SPIN`] (a decode step has about a thousand jobs, a few microseconds apart),
//! then parks, so an idle pool costs nothing.
#![allow(unsafe_code, reason = "workers borrow the caller's closure for the time of one job")]

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint;
use std::mem;
use std::num::NonZeroUsize;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a thread looks for work before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Looks between two readings of the clock.
const LOOKS: u32 = 32;

/// A fixed set of threads; see the module.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

/// What a job calls: `(worker, task)`.
type Call = dyn Fn(usize, usize) + Sync;

struct Job {
    /// Borrowed from the caller of [`Pool::run`]; valid while tasks of the job are unfinished.
    call: *const Call,
    n_tasks: usize,
}

struct Shared {
    /// Written by the caller while no task exists, read by whoever holds an unfinished task.
    job: UnsafeCell<Option<Job>>,
    /// Tasks not yet claimed. Taking it from `n` to `n - 1` claims task `n_tasks - n`.
    unclaimed: AtomicUsize,
    /// Tasks of the job that are not finished.
    unfinished: AtomicUsize,
    /// A job is being run; a second one would overwrite it.
    busy: AtomicBool,
    stop: AtomicBool,
    /// For each worker but the caller: whether it sleeps or is about to.
    asleep: Box<[AtomicBool]>,
    /// Whether the caller sleeps, or is about to, until the last task is finished.
    caller_asleep: AtomicBool,
    finished: Condvar,
    finished_lock: Mutex<()>,
    /// Of the first task that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: all fields but `job` are `Sync`. `job` is written only in `Pool::run`, while `busy` is held and no task is
// unfinished, and read only by a thread that has claimed a task and not finished it. The claim reads `unclaimed` with
// Acquire what the caller stored with Release after the write; the caller's next write comes after it read
// `unfinished == 0` with Acquire, which every reader decremented with Release after its read.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while its target is borrowed by `Pool::run`, and its target is
// `Sync`; no field is tied to a thread.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads, one of which is the caller of [`Self::run`]; fewer if the system refuses some.
    ///
    /// All of them run when it returns: a thread's first steps allocate, which must not fall into a later job.
    pub fn new(threads: NonZeroUsize) -> Self {
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            unclaimed: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (1..threads.get()).map(|_| AtomicBool::new(false)).collect(),
            caller_asleep: AtomicBool::new(false),
            finished: Condvar::new(),
            finished_lock: Mutex::new(()),
            panic: Mutex::new(None),
        });
        let running = Arc::new(AtomicUsize::new(0));
        let spawn = |worker| {
            let (shared, running) = (Arc::clone(&shared), Arc::clone(&running));
            let work = move || {
                running.fetch_add(1, Ordering::Release);
                drop(running);
                shared.work(worker);
            };
            thread::Builder::new().name(format!("compute-{worker}")).spawn(work).ok()
        };
        let workers: Vec<_> = (1..threads.get()).map_while(spawn).collect();
        while running.load(Ordering::Acquire) < workers.len() {
            thread::yield_now();
        }
        Self { shared, workers }
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(0..n_tasks)`, each once, in any order, on any thread; returns when all are finished.
    ///
    /// # Panics
    /// With the panic of a task, after the others have run; and if called from inside a task.
    pub fn run(&self, n_tasks: usize, task: impl Fn(usize) + Sync) {
        self.run_job(n_tasks, &|_, index| task(index));
    }

    /// The same with something of its own for each thread.
    ///
    /// # Panics
    /// As [`Self::run`], and unless `locals` has one element per thread.
    pub fn run_with<L: Send>(
        &self,
        locals: &mut [L],
        n_tasks: usize,
        task: impl Fn(&mut L, usize) + Sync,
    ) {
        assert_eq!(locals.len(), self.threads(), "one local per thread");
        let locals = PerWorker(locals.as_mut_ptr());
        self.run_job(n_tasks, &|worker, index| {
            // SAFETY: in bounds, because workers are numbered below `threads()`; exclusive, because a worker runs
            // one task at a time, only the thread with that number uses the element, and `locals` is borrowed for
            // the whole job.
            let local = unsafe { &mut *locals.get(worker) };
            task(local, index);
        });
    }

    fn run_job(&self, n_tasks: usize, call: &(dyn Fn(usize, usize) + Sync)) {
        if n_tasks == 0 {
            return;
        }
        let shared = &*self.shared;
        let _busy = Busy::new(&shared.busy);
        if n_tasks == 1 {
            // Nothing to share: a worker could only be slower.
            return call(0, 0);
        }
        // SAFETY: lengthens the borrow of `call` for the job; `run_job` returns only after `unfinished` is 0, and
        // nobody dereferences the pointer without holding an unfinished task. It does not unwind before that:
        // panics of tasks are caught in `Shared::finish_one`.
        let call: &Call = unsafe { mem::transmute::<&(dyn Fn(usize, usize) + Sync), &Call>(call) };
        // SAFETY: no task exists and the job is ours to set, so nobody else reads or writes; see `Sync for Shared`.
        unsafe { *shared.job.get() = Some(Job { call, n_tasks }) };
        shared.unfinished.store(n_tasks, Ordering::Relaxed);
        // SeqCst, like the worker's store to `asleep`: either the worker sees the tasks or we see it asleep.
        shared.unclaimed.store(n_tasks, Ordering::SeqCst);
        self.wake(n_tasks - 1);
        while shared.finish_one(0) {}
        shared.wait_finished();
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            panic::resume_unwind(panic);
        }
    }

    /// Wakes sleeping workers, as many as could be of use.
    fn wake(&self, mut wanted: usize) {
        for (asleep, worker) in self.shared.asleep.iter().zip(&self.workers) {
            if wanted == 0 {
                break;
            }
            if asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
            wanted -= 1;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in &self.workers {
            worker.thread().unpark();
        }
        for worker in self.workers.drain(..) {
            // A worker cannot panic: panics of tasks are caught.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, worker: usize) {
        while self.wait_for_work(worker) {
            while self.finish_one(worker) {}
        }
    }

    /// Runs one task, if there is one.
    fn finish_one(&self, worker: usize) -> bool {
        let claim = self.unclaimed.fetch_update(Ordering::Acquire, Ordering::Relaxed, |n| {
            // A plain decrement would wrap below zero.
            n.checked_sub(1)
        });
        let Ok(unclaimed) = claim else {
            return false;
        };
        // SAFETY: a task is claimed and unfinished, so the job is neither written nor over; see `Sync for Shared`.
        let (call, index) = unsafe {
            let job = (*self.job.get()).as_ref().expect("tasks exist only after the job");
            (&*job.call, job.n_tasks - unclaimed)
        };
        if let Err(panic) = panic::catch_unwind(AssertUnwindSafe(|| call(worker, index))) {
            let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(panic);
        }
        // SeqCst against `caller_asleep`, as above. From here on the job may be gone.
        if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1
            && self.caller_asleep.load(Ordering::SeqCst)
        {
            drop(self.finished_lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.finished.notify_one();
        }
        true
    }

    /// Waits until there may be a task. False: the pool is being dropped.
    fn wait_for_work(&self, worker: usize) -> bool {
        let ready =
            || self.unclaimed.load(Ordering::SeqCst) != 0 || self.stop.load(Ordering::SeqCst);
        let asleep = &self.asleep[worker - 1];
        while !spin(ready) {
            asleep.store(true, Ordering::SeqCst);
            if !ready() {
                thread::park();
            }
            asleep.store(false, Ordering::SeqCst);
        }
        !self.stop.load(Ordering::SeqCst)
    }

    fn wait_finished(&self) {
        let finished = || self.unfinished.load(Ordering::SeqCst) == 0;
        if spin(finished) {
            return;
        }
        let mut lock = self.finished_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.caller_asleep.store(true, Ordering::SeqCst);
        while !finished() {
            lock = self.finished.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_asleep.store(false, Ordering::SeqCst);
    }
}

/// Looks for `ready` until it holds (true) or [`SPIN`] has passed (false).
fn spin(ready: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..LOOKS {
            if ready() {
                return true;
            }
            hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return ready();
        }
    }
}

/// The right to set a job.
struct Busy<'a>(&'a AtomicBool);

impl<'a> Busy<'a> {
    fn new(busy: &'a AtomicBool) -> Self {
        assert!(!busy.swap(true, Ordering::Acquire), "a pool runs one job at a time");
        Self(busy)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

struct PerWorker<L>(*mut L);

impl<L> PerWorker<L> {
    fn get(&self, worker: usize) -> *mut L {
        self.0.wrapping_add(worker)
    }
}

// SAFETY: threads take different elements, and elements may be used from other threads (`L: Send`).
unsafe impl<L: Send> Sync for PerWorker<L> {}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::new(NonZeroUsize::new(threads).unwrap())
    }

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for threads in [1, 2, 4, 7] {
            let pool = pool(threads);
            for round in 0..2_000 {
                let n_tasks = round % 23;
                let runs: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n_tasks, |task| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                });
                let runs: Vec<usize> = runs.into_iter().map(AtomicUsize::into_inner).collect();
                assert_eq!(runs, vec![1; n_tasks], "threads {threads}, round {round}");
            }
        }
    }

    #[test]
    fn workers_wake_from_sleep() {
        let pool = pool(4);
        for _ in 0..20 {
            thread::sleep(4 * SPIN);
            let sum = AtomicUsize::new(0);
            pool.run(100, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4_950);
        }
    }

    #[test]
    fn the_caller_sleeps_through_a_long_task_and_wakes() {
        let pool = pool(2);
        let both = std::sync::Barrier::new(2);
        let slow_done = AtomicBool::new(false);
        let caller = thread::current().id();
        pool.run(2, |_| {
            both.wait();
            if thread::current().id() != caller {
                thread::sleep(40 * SPIN);
                slow_done.store(true, Ordering::Relaxed);
            }
        });
        assert!(slow_done.into_inner());
    }

    #[test]
    fn each_thread_has_its_own_local() {
        let pool = pool(4);
        let mut counts = vec![0_usize; 4];
        for _ in 0..500 {
            pool.run_with(&mut counts, 9, |count, _| *count += 1);
        }
        assert_eq!(counts.iter().sum::<usize>(), 4_500);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = pool(3);
        let ran = AtomicUsize::new(0);
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            pool.run(10, |task| {
                ran.fetch_add(1, Ordering::Relaxed);
                assert_ne!(task, 3, "task three");
            });
        }));
        assert!(result.unwrap_err().downcast_ref::<String>().unwrap().contains("task three"));
        assert_eq!(ran.load(Ordering::Relaxed), 10);
        pool.run(5, |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 15);
    }

    #[test]
    fn a_job_inside_a_job_is_refused() {
        for threads in [1, 3] {
            let pool = pool(threads);
            let nested = panic::catch_unwind(AssertUnwindSafe(|| {
                pool.run(1, |_| pool.run(1, |_| {}));
            }));
            assert!(nested.unwrap_err().downcast_ref::<&str>().unwrap().contains("one job"));
        }
    }

    #[test]
    fn dropping_a_pool_joins_sleeping_and_spinning_workers() {
        for pause in [Duration::ZERO, 4 * SPIN] {
            for _ in 0..20 {
                let pool = pool(3);
                pool.run(3, |_| {});
                thread::sleep(pause);
            }
        }
    }
}
