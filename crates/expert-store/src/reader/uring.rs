//! `io_uring`: a read as several requests to the system, all submitted and awaited in one call.
//!
//! Every reader thread has its own ring, so nothing is shared and a read ends before its call does: faults, short reads
//! and cancellation are what they are with `pread`. What may be gained is that parts of one long read are at the disk at
//! once, without a thread for each; and that pages of slots, once prepared, need no preparation for a read.
#![allow(unsafe_code, reason = "the system writes to memory that a request names by its address")]

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, types};

use super::Reader;
use crate::destination::{ALIGN, SlotMemory};
use crate::file::OpenFile;
use crate::slots::Slots;

/// Requests that a read is cut into at most.
const MOST_PARTS: usize = 8;

/// Shortest parts, a multiple of [`ALIGN`]; shorter ones cost more than they bring.
const LEAST_PART_BYTES: usize = 512 << 10;

/// Pause before a call that the system postponed.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// Most slots that a ring keeps prepared.
const MOST_SLOTS: usize = 1 << 14;

pub(crate) struct UringReader {
    ring: RefCell<Ring>,
    slots: Arc<Slots>,
}

impl UringReader {
    /// Makes a ring. Memory of `slots` is prepared when it is first read into, where the system allows it.
    ///
    /// # Errors
    /// The system has no rings (`ENOSYS`), forbids them (`EPERM`), or has none that read (`EOPNOTSUPP`).
    pub(crate) fn new(slots: Arc<Slots>) -> io::Result<Self> {
        let io = IoUring::new(MOST_PARTS as u32)?;
        let mut probe = Probe::new();
        io.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let ring = Ring { io, broken: None, prepared: Prepared::Not };
        Ok(Self { ring: RefCell::new(ring), slots })
    }
}

impl Reader for UringReader {
    fn read_at(&self, file: &OpenFile, offset: u64, out: &mut [u8]) -> io::Result<usize> {
        let mut ring = self.ring.borrow_mut();
        let slot = self.slots.find(out).filter(|slot| ring.prepare(*slot, self.slots.all()));
        let part = out.len().div_ceil(MOST_PARTS).max(LEAST_PART_BYTES).next_multiple_of(ALIGN);
        let mut results = [0; MOST_PARTS];
        let parts = out.chunks_mut(part);
        let n = parts.len();
        ring.read((file.as_raw_fd(), slot), offset, parts, &mut results)?;
        let lens = (0..n).map(|i| part.min(out.len() - i * part));
        joined(lens.zip(results))
    }
}

/// What a read of all parts would have given: bytes up to the first one that is short; or the error, if it comes first.
fn joined(parts: impl Iterator<Item = (usize, i32)>) -> io::Result<usize> {
    let mut total = 0;
    for (len, result) in parts {
        let Ok(n) = usize::try_from(result) else {
            // Behind bytes, the error comes again when the read is continued.
            return if total > 0 { Ok(total) } else { Err(io::Error::from_raw_os_error(-result)) };
        };
        total += n;
        if n < len {
            break;
        }
    }
    Ok(total)
}

struct Ring {
    io: IoUring,
    /// Why requests may lie in the ring that were never submitted: it is not used any more.
    broken: Option<i32>,
    prepared: Prepared,
}

/// Slots whose pages the system keeps at hand for this ring.
enum Prepared {
    /// None yet.
    Not,
    /// Those that are true.
    Some(Vec<bool>),
    /// None, nor will be: the system has no such table, or allows no (more) locked memory.
    Refused,
}

impl Ring {
    /// Has the pages of a slot kept at hand; whether they are.
    fn prepare(&mut self, slot: usize, slots: &[SlotMemory]) -> bool {
        let n_slots = slots.len().min(MOST_SLOTS);
        if matches!(self.prepared, Prepared::Not) {
            let table = self.io.submitter().register_buffers_sparse(n_slots as u32);
            self.prepared =
                table.map_or(Prepared::Refused, |()| Prepared::Some(vec![false; n_slots]));
        }
        let Prepared::Some(done) = &mut self.prepared else { return false };
        let Some(known) = done.get_mut(slot) else { return false };
        if !*known {
            let memory = &slots[slot];
            let base = std::ptr::without_provenance_mut(memory.address());
            let span = libc::iovec { iov_base: base, iov_len: memory.len() };
            // SAFETY: the slot stays where it is until the store is dropped (`SlotMemory::new`), which waits for its
            // reader threads, and each of them drops its ring; until then only reads of this ring write there.
            let kept =
                unsafe { self.io.submitter().register_buffers_update(slot as u32, &[span], None) };
            if kept.is_err() {
                // Slots that are prepared stay so, but are not used as such: one way of reading is enough.
                self.prepared = Prepared::Refused;
                return false;
            }
            *known = true;
        }
        true
    }

    /// Reads all parts, which follow each other in the file, and returns when the system is done with their memory.
    fn read<'a>(
        &mut self,
        (fd, slot): (i32, Option<usize>),
        offset: u64,
        parts: impl Iterator<Item = &'a mut [u8]>,
        results: &mut [i32; MOST_PARTS],
    ) -> io::Result<()> {
        if let Some(error) = self.broken {
            return Err(io::Error::from_raw_os_error(error));
        }
        let (mut waiting, mut at) = (0, offset);
        for part in parts {
            let (fd, base, len) = (types::Fd(fd), part.as_mut_ptr(), part.len() as u32);
            let request = match slot {
                None => opcode::Read::new(fd, base, len).offset(at).build(),
                Some(slot) => opcode::ReadFixed::new(fd, base, len, slot as u16).offset(at).build(),
            };
            let request = request.user_data(waiting as u64);
            // SAFETY: the descriptor is open and the part is borrowed, both until this call returns; it does not before
            // the request has ended, or is known to have never been submitted.
            let pushed = unsafe { self.io.submission().push(&request) };
            pushed.expect("the ring has room for all parts, and is empty between reads");
            at += part.len() as u64;
            waiting += 1;
        }
        while waiting > 0 {
            let entered = self.io.submit_and_wait(waiting);
            waiting -= self.collect(results);
            if let Err(error) = entered {
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::EBUSY) => thread::sleep(RETRY_PAUSE),
                    _ => return Err(self.give_up(error, waiting, results)),
                }
            }
        }
        Ok(())
    }

    /// Takes what has ended; how many that are.
    fn collect(&mut self, results: &mut [i32; MOST_PARTS]) -> usize {
        let ended = self.io.completion().map(|entry| {
            results[entry.user_data() as usize] = entry.result();
        });
        ended.count()
    }

    /// The ring refuses to be entered: waits for what was submitted and leaves the rest where it is, for good.
    fn give_up(
        &mut self,
        error: io::Error,
        mut waiting: usize,
        results: &mut [i32; MOST_PARTS],
    ) -> io::Error {
        while waiting > self.io.submission().len() {
            thread::sleep(RETRY_PAUSE);
            waiting -= self.collect(results);
        }
        self.broken = Some(error.raw_os_error().unwrap_or(libc::EIO));
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_up_to_the_first_that_is_short() {
        let join =
            |parts: &[(usize, i32)]| joined(parts.iter().copied()).map_err(|e| e.raw_os_error());
        let eio = -libc::EIO;
        assert_eq!(join(&[(100, 100), (100, 100), (50, 50)]), Ok(250));
        assert_eq!(join(&[(100, 100), (100, 30), (50, 50)]), Ok(130), "a hole is not bridged");
        assert_eq!(join(&[(100, 0), (100, 100)]), Ok(0));
        assert_eq!(join(&[(100, 100), (100, eio)]), Ok(100));
        assert_eq!(join(&[(100, eio), (100, 100)]), Err(Some(libc::EIO)));
        assert_eq!(join(&[]), Ok(0));
    }
}
