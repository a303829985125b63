//! Memory for what requests bring: a fixed number of bytes for all of them, which is part of the plan.
//!
//! Whoever wants more than is left is told to come back; whoever wants more than there is, that it is too much.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{ApiError, ErrorKind};

/// Bytes are counted in units of this many.
const UNIT: usize = 1024;
/// Seconds after which there may be room again.
const RETRY_S: u32 = 2;

/// The room for all requests.
#[derive(Debug, Clone)]
pub(crate) struct Room {
    units: Arc<Semaphore>,
    bytes: usize,
}

/// A part of it, until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    room: Room,
    permit: Option<OwnedSemaphorePermit>,
}

impl Room {
    pub(crate) fn new(bytes: usize) -> Self {
        let units = Arc::new(Semaphore::new(bytes / UNIT));
        Self { units, bytes: bytes / UNIT * UNIT }
    }

    /// All of it.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Nothing yet, for a request that is about to bring something.
    pub(crate) fn hold(&self) -> Held {
        Held { room: self.clone(), permit: None }
    }
}

impl Held {
    fn units(&self) -> usize {
        self.permit.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }

    /// Takes what is missing to `bytes` in all.
    ///
    /// # Errors
    /// Too much for any time, or for now.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> Result<(), ApiError> {
        if bytes > self.room.bytes {
            let most = self.room.bytes;
            return Err(ApiError::new(
                ErrorKind::TooLarge,
                format!(
                    "the request takes {bytes} bytes of memory; all requests together have {most}"
                ),
            ));
        }
        let missing = bytes.div_ceil(UNIT).saturating_sub(self.units());
        let units = Arc::clone(&self.room.units);
        // There are no more units than a `u32` counts, or the semaphore refuses.
        let more = u32::try_from(missing).ok().and_then(|n| units.try_acquire_many_owned(n).ok());
        let more = more.ok_or_else(|| {
            ApiError::new(ErrorKind::Busy(RETRY_S), "too many large requests at once; try again")
        })?;
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            permit => *permit = Some(more),
        }
        Ok(())
    }

    /// As [`Self::grow_to`], besides what is held.
    pub(crate) fn grow_by(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.grow_to(self.units() * UNIT + bytes)
    }

    /// Gives back what is beyond `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let beyond = self.units().saturating_sub(bytes.div_ceil(UNIT));
        if let Some(permit) = &mut self.permit {
            drop(permit.split(beyond));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_back_and_never_given_twice() {
        let room = Room::new(10 * UNIT);
        let (mut first, mut second) = (room.hold(), room.hold());
        first.grow_to(6 * UNIT).unwrap();
        assert_eq!(second.grow_to(5 * UNIT).unwrap_err().kind, ErrorKind::Busy(RETRY_S));
        second.grow_to(4 * UNIT).unwrap();
        assert_eq!(second.grow_by(1).unwrap_err().kind, ErrorKind::Busy(RETRY_S));
        first.shrink_to(UNIT + 1);
        second.grow_by(4 * UNIT).unwrap();
        assert_eq!(second.grow_by(1).unwrap_err().kind, ErrorKind::Busy(RETRY_S));
        drop(second);
        first.grow_to(10 * UNIT).unwrap();
        assert_eq!(first.grow_to(10 * UNIT + 1).unwrap_err().kind, ErrorKind::TooLarge);
    }
}
