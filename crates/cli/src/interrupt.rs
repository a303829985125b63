//! Ctrl-C: once stops the answer, twice quits; of commands that have no answer to stop, once.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

static PRESSED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();
/// Whether the first press quits.
static AT_ONCE: AtomicBool = AtomicBool::new(false);

/// Presses since the last [`clear`]. The handler is installed at the first call.
pub(crate) fn pressed() -> bool {
    counter().load(Ordering::Relaxed) > 0
}

/// From here on the first press quits, and leaves no unfinished file behind.
pub(crate) fn quit_at_once() {
    AT_ONCE.store(true, Ordering::Relaxed);
    counter();
}

/// Forgets earlier presses, before an answer begins.
pub(crate) fn clear() {
    counter().store(0, Ordering::Relaxed);
}

fn counter() -> &'static AtomicUsize {
    PRESSED.get_or_init(|| {
        let counter = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&counter);
        let handler = move || {
            if seen.fetch_add(1, Ordering::Relaxed) > 0 || AT_ONCE.load(Ordering::Relaxed) {
                crate::output::abandon();
                std::process::exit(130);
            }
        };
        if let Err(error) = ctrlc::set_handler(handler) {
            crate::report::note(&format!("Ctrl-C will end the program at once: {error}"));
        }
        counter
    })
}
