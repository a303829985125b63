//! Ctrl-C: once stops the answer, twice quits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

static PRESSED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Presses since the last [`clear`]. The handler is installed at the first call.
pub(crate) fn pressed() -> bool {
    counter().load(Ordering::Relaxed) > 0
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
            if seen.fetch_add(1, Ordering::Relaxed) > 0 {
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
