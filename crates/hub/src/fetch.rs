//! From a host into unfinished files: a few connections, each at one chunk at a time.
//!
//! A file is cut into chunks; threads take chunks from a common queue, so that a large file uses all connections and
//! small ones share them. Whoever fetches the last chunk of a file hashes it. A host that ignores ranges gets one
//! connection for the whole file. The first error ends all threads; what they have is recorded before they leave.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::client::{Answer, Client, Failure};
use crate::error::HubError;
use crate::part::{Part, Verdict, Writer};
use crate::pull::{Progress, Tuning};
use crate::retry::{Patience, Stop, TRANSFER_TRIES};
use crate::url::Url;

/// Bytes read from a connection at a time.
const BUFFER_BYTES: usize = 256 << 10;
/// Less than this between two failures is no progress, lest a host that gives a byte a try is asked for ever.
const PROGRESS_BYTES: u64 = 256 << 10;
/// How long a thread waits for others that may leave it work.
const IDLE: Duration = Duration::from_millis(20);
/// Times that a file whose hash is wrong is fetched: what came first may be a mix of two contents.
const MOST_MISMATCHES: u32 = 2;

/// All that the threads share.
pub(crate) struct Fetch<'a> {
    client: &'a Client,
    parts: Vec<Job<'a>>,
    queue: Mutex<VecDeque<Task>>,
    unfinished: AtomicUsize,
    position: AtomicU64,
    error: Mutex<Option<HubError>>,
    stop: &'a Stop,
    tuning: &'a Tuning,
    progress: &'a dyn Progress,
}

struct Job<'a> {
    part: &'a Part,
    url: Url,
    /// Chunks that nobody has fetched to their end.
    open_chunks: AtomicUsize,
}

/// Something to fetch: a chunk of a job, or all of it by one connection.
#[derive(Clone, Copy)]
struct Task {
    job: usize,
    chunk: usize,
    writer: Writer,
}

/// How a task ended.
enum End {
    /// The writer filled what was its own.
    Full(Writer),
    /// Another thread fetches the file as a whole, or all are to stop.
    Left,
}

impl<'a> Fetch<'a> {
    /// Work for these files; `position` bytes of the pull are here already.
    pub(crate) fn new(
        client: &'a Client,
        parts: Vec<(&'a Part, Url)>,
        position: u64,
        stop: &'a Stop,
        tuning: &'a Tuning,
        progress: &'a dyn Progress,
    ) -> Self {
        let jobs = parts.into_iter().map(|(part, url)| {
            let open_chunks = AtomicUsize::new(part.chunks());
            Job { part, url, open_chunks }
        });
        let parts: Vec<Job> = jobs.collect();
        let tasks = |(index, job): (usize, &Job)| {
            // A file without a byte has no chunk and is hashed all the same.
            chunk_tasks(index, job.part.chunks().max(1))
        };
        let queue: VecDeque<_> = parts.iter().enumerate().flat_map(tasks).collect();
        Self {
            client,
            unfinished: AtomicUsize::new(parts.len()),
            parts,
            queue: Mutex::new(queue),
            position: AtomicU64::new(position),
            error: Mutex::new(None),
            stop,
            tuning,
            progress,
        }
    }

    /// Fetches and verifies all. On any error, and when asked to stop, what is here is recorded.
    pub(crate) fn run(&self) -> Result<(), HubError> {
        let threads = self.tuning.connections.clamp(1, self.queue_length().max(1));
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| self.work())).collect();
            while workers.iter().any(|worker| !worker.is_finished()) {
                if self.stop.is_set() {
                    // Threads that wait for the network see it as an error, and then see why.
                    self.client.shut_down();
                }
                std::thread::sleep(IDLE);
            }
        });
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).take();
        let saved = self.parts.iter().map(|job| job.part.save()).find(Result::is_err);
        match (error, saved) {
            (Some(error), _) | (None, Some(Err(error))) => Err(error),
            _ => Ok(()),
        }
    }

    /// Where the pull is, in bytes.
    pub(crate) fn position(&self) -> u64 {
        self.position.load(Ordering::Relaxed)
    }

    fn queue_length(&self) -> usize {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn work(&self) {
        let mut buffer = vec![0; BUFFER_BYTES];
        while self.unfinished.load(Ordering::Acquire) > 0 && !self.stop.is_set() {
            let next = self.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(task) = next else {
                // A file that another thread hashes may come back.
                std::thread::sleep(IDLE);
                continue;
            };
            if let Err(error) = self.step(task, &mut buffer) {
                let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
                // When stopping, broken connections are the stop's doing.
                if !self.stop.is_set() {
                    *first = Some(error);
                }
                self.stop.fail();
            }
        }
    }

    fn step(&self, task: Task, buffer: &mut [u8]) -> Result<(), HubError> {
        let job = &self.parts[task.job];
        if job.part.chunks() == 0 {
            return self.finish(task.job);
        }
        match self.fill(job, task, buffer)? {
            End::Full(Writer::Whole) => self.finish(task.job),
            // Whoever turns to fetching the whole never counts its chunk as filled, so at 0 nobody is writing.
            End::Full(Writer::Chunk) if job.open_chunks.fetch_sub(1, Ordering::AcqRel) == 1 => {
                self.finish(task.job)
            }
            End::Full(Writer::Chunk) | End::Left => Ok(()),
        }
    }

    /// Hashes a file that is full. A wrong one is fetched once more.
    fn finish(&self, index: usize) -> Result<(), HubError> {
        let job = &self.parts[index];
        let wanted = &job.part.wanted;
        self.progress.verifying(wanted.path.as_str());
        let verdict = job.part.verify(|| !self.stop.is_set())?;
        self.progress.verified();
        match verdict {
            Verdict::Stopped => Ok(()),
            Verdict::Right => {
                self.unfinished.fetch_sub(1, Ordering::AcqRel);
                Ok(())
            }
            Verdict::Wrong(found, times) if times >= MOST_MISMATCHES || wanted.size == 0 => {
                job.part.discard()?;
                Err(HubError::Hash {
                    path: wanted.path.as_str().to_owned(),
                    kind: wanted.hash.kind(),
                    found,
                    needed: wanted.hash.hex(),
                })
            }
            Verdict::Wrong(..) => {
                let path = wanted.path.as_str();
                self.progress.remark(&format!("{path} came out wrong and is fetched once more"));
                self.restart(job)?;
                job.open_chunks.store(job.part.chunks(), Ordering::Release);
                let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
                if job.part.is_whole() {
                    queue.push_back(Task { job: index, chunk: 0, writer: Writer::Whole });
                } else {
                    queue.extend(chunk_tasks(index, job.part.chunks()));
                }
                Ok(())
            }
        }
    }

    fn restart(&self, job: &Job<'_>) -> Result<(), HubError> {
        self.moved(0, job.part.done());
        job.part.restart()
    }

    fn moved(&self, forward: u64, back: u64) {
        let before = self.position.fetch_add(forward.wrapping_sub(back), Ordering::Relaxed);
        self.progress.at(before.wrapping_add(forward).wrapping_sub(back));
    }

    /// Fetches what is missing of a task, in as many tries as it is worth.
    fn fill(&self, job: &Job<'_>, task: Task, buffer: &mut [u8]) -> Result<End, HubError> {
        let what = job.part.wanted.path.as_str();
        let mut patience = Patience::new(self.tuning.first_pause, TRANSFER_TRIES);
        let mut writer = task.writer;
        let mut before = job.part.done();
        loop {
            let failure = match self.attempt(job, task.chunk, &mut writer, buffer) {
                Ok(end) => return Ok(end),
                Err(failure) => failure,
            };
            if self.stop.is_set() {
                return Ok(End::Left);
            }
            // Of a whole file, every try begins at the front.
            let now = job.part.done();
            if writer == Writer::Chunk && now >= before.saturating_add(PROGRESS_BYTES) {
                patience.renew();
                before = now;
            }
            if let Failure::Passing(problem, _) = &failure {
                self.progress.remark(&format!("{what}: {problem}; trying again"));
            }
            let pause = patience.after(failure, &job.url.authority(), what)?;
            if !self.stop.pause(pause) {
                return Ok(End::Left);
            }
        }
    }

    /// One request. A writer of a chunk turns into that of the whole file if the host ignores ranges.
    fn attempt(
        &self,
        job: &Job<'_>,
        chunk: usize,
        writer: &mut Writer,
        buffer: &mut [u8],
    ) -> Result<End, Failure> {
        let part = job.part;
        let what = part.wanted.path.as_str();
        if *writer == Writer::Whole {
            self.restart(job)?;
            let answer = self.client.get(&job.url, None, what)?;
            return self.receive(job, Writer::Whole, 0, answer, buffer);
        }
        let missing = part.missing(chunk);
        if missing.is_empty() {
            return Ok(if part.is_whole() { End::Left } else { End::Full(Writer::Chunk) });
        }
        let range = (missing != (0..part.wanted.size)).then(|| missing.clone());
        let ranged = range.is_some();
        let answer = self.client.get(&job.url, range, what)?;
        part.note_etag(answer.etag.clone());
        if ranged && answer.part.is_none() {
            if !part.claim_whole() {
                return Ok(End::Left);
            }
            *writer = Writer::Whole;
            self.restart(job)?;
            return self.receive(job, Writer::Whole, 0, answer, buffer);
        }
        let end = self.receive(job, Writer::Chunk, missing.start, answer, buffer)?;
        if !part.missing(chunk).is_empty() {
            // A host may send a part of what was asked for; the rest is asked for again.
            return Err(Failure::Passing("less came than was asked for".to_owned(), None));
        }
        Ok(end)
    }

    /// Puts a body at its place. It may not be longer than promised; if it is shorter, that may pass.
    fn receive(
        &self,
        job: &Job<'_>,
        writer: Writer,
        start: u64,
        mut answer: Answer,
        buffer: &mut [u8],
    ) -> Result<End, Failure> {
        let wanted = &job.part.wanted;
        let wrong = |found: String| {
            let (path, host) = (wanted.path.as_str().to_owned(), answer.host.clone());
            Failure::Final(HubError::Length { path, host, found, needed: wanted.size })
        };
        let end = match &answer.part {
            Some((_, Some(total))) if *total != wanted.size => {
                return Err(wrong(format!("a part of {total}")));
            }
            Some((range, _)) => range.end,
            None => match answer.length {
                Some(length) if length != wanted.size => return Err(wrong(length.to_string())),
                _ => wanted.size,
            },
        };
        let mut at = start;
        while at < end {
            if self.stop.is_set() {
                return Ok(End::Left);
            }
            let most = buffer.len().min((end - at) as usize);
            let read = answer.body.read(&mut buffer[..most]);
            let read = read.map_err(|error| Failure::Passing(error.to_string(), None))?;
            if read == 0 {
                let problem = format!("the connection ended {} bytes early", end - at);
                return Err(Failure::Passing(problem, None));
            }
            if !job.part.write(writer, at, &buffer[..read])? {
                return Ok(End::Left);
            }
            at += read as u64;
            self.moved(read as u64, 0);
        }
        // The end is looked for also where it is known, so that the connection can be used again.
        let more = matches!(answer.body.read(&mut buffer[..1]), Ok(1));
        if more && answer.part.is_none() {
            return Err(wrong("more".to_owned()));
        }
        Ok(End::Full(writer))
    }
}

fn chunk_tasks(job: usize, chunks: usize) -> impl Iterator<Item = Task> {
    (0..chunks).map(move |chunk| Task { job, chunk, writer: Writer::Chunk })
}
