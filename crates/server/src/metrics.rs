//! Counters, as Prometheus reads them.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::answerer::Event;
use crate::models::Running;

/// Classes of status codes.
const CLASSES: [&str; 4] = ["2xx", "3xx", "4xx", "5xx"];

/// Counters of the server itself.
#[derive(Debug)]
pub(crate) struct Metrics {
    began: Instant,
    requests: [AtomicU64; CLASSES.len()],
    generations: AtomicU64,
    active: AtomicU64,
    tokens: AtomicU64,
    reasoning: AtomicU64,
    failed: AtomicU64,
    connections: AtomicU64,
    refused_connections: AtomicU64,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            requests: Default::default(),
            generations: AtomicU64::new(0),
            active: AtomicU64::new(0),
            tokens: AtomicU64::new(0),
            reasoning: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            refused_connections: AtomicU64::new(0),
        }
    }
}

/// A connection that is open.
pub(crate) struct Connected(Arc<Metrics>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Metrics {
    pub(crate) fn answered(&self, status: u16) {
        let class = usize::from(status / 100).saturating_sub(2).min(CLASSES.len() - 1);
        add(&self.requests[class], 1);
    }

    pub(crate) fn started(&self) {
        add(&self.generations, 1);
        add(&self.active, 1);
    }

    pub(crate) fn finished(&self) {
        self.active.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, event: &Event) {
        match event {
            Event::Token(token) if token.counts => {
                add(&self.tokens, 1);
                add(&self.reasoning, u64::from(token.is_reasoning));
            }
            Event::Failed(_) => add(&self.failed, 1),
            _ => {}
        }
    }

    /// A connection, which counts until the result is dropped.
    pub(crate) fn connected(self: &Arc<Self>) -> Connected {
        add(&self.connections, 1);
        Connected(Arc::clone(self))
    }

    pub(crate) fn refused_connection(&self) {
        add(&self.refused_connections, 1);
    }

    /// Generations that are being made.
    pub(crate) fn active(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    /// The text that Prometheus reads.
    pub(crate) fn text(&self, running: Option<&Running>) -> String {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut out = String::new();
        let uptime = self.began.elapsed().as_secs();
        let mut metric = |name: &str, kind: &str, help: &str, value: u64| {
            let _ = writeln!(
                out,
                "# HELP sakia_{name} {help}\n# TYPE sakia_{name} {kind}\nsakia_{name} {value}"
            );
        };
        metric("uptime_seconds", "gauge", "Since the server began.", uptime);
        metric("connections", "gauge", "Open connections.", get(&self.connections));
        let refused = get(&self.refused_connections);
        metric("connections_refused_total", "counter", "Closed at once: too many.", refused);
        metric("generations_total", "counter", "Requests for text.", get(&self.generations));
        metric("generations_active", "gauge", "Being waited for.", get(&self.active));
        metric("generations_failed_total", "counter", "Answers that broke off.", get(&self.failed));
        metric("tokens_total", "counter", "Tokens generated.", get(&self.tokens));
        metric("reasoning_tokens_total", "counter", "Of these, thought.", get(&self.reasoning));
        metric("model_loaded", "gauge", "Whether a model is loaded.", u64::from(running.is_some()));
        if let Some(Running { stats, memory_bytes, .. }) = running {
            metric("model_memory_bytes", "gauge", "What its plan promises.", *memory_bytes);
            metric("jobs_waiting", "gauge", "In the queue.", stats.queued as u64);
            metric("jobs_running", "gauge", "In passes.", stats.running as u64);
            metric("jobs_finished_total", "counter", "With an answer.", stats.finished);
            metric("jobs_failed_total", "counter", "Without one.", stats.failed);
            metric("jobs_cancelled_total", "counter", "Taken back.", stats.cancelled.jobs);
            metric("jobs_refused_total", "counter", "The queue was full.", stats.refused);
            let cut = stats.cancelled.cut_passes;
            metric("passes_cut_total", "counter", "Ended between layers for that.", cut);
            metric("prompt_passes_total", "counter", "Over prompts.", stats.prompt_passes);
            metric("decode_passes_total", "counter", "Over generated rows.", stats.decode_passes);
            metric("layers_total", "counter", "Layers that began.", stats.layers);
            metric("prompt_tokens_total", "counter", "Prompt tokens read.", stats.prompt_rows);
            let cached = stats.cached_rows;
            metric(
                "prompt_tokens_cached_total",
                "counter",
                "Prompt tokens not read again.",
                cached,
            );
            metric("prefix_bytes", "gauge", "Of prefixes in memory.", stats.prefix.bytes);
            metric("prefix_disk_bytes", "gauge", "Of prefixes on disk.", stats.prefix.disk_bytes);
            let experts = &stats.experts;
            metric("expert_hits_total", "counter", "Experts that were there.", experts.pool.hits);
            let misses = experts.pool.misses;
            metric("expert_misses_total", "counter", "Experts that were read.", misses);
            let read = experts.store.device_bytes;
            metric("expert_read_bytes_total", "counter", "Read from disk.", read);
        }
        let _ = writeln!(
            out,
            "# HELP sakia_http_requests_total Answers by class of status.\n# TYPE sakia_http_requests_total counter"
        );
        for (class, counter) in CLASSES.iter().zip(&self.requests) {
            let _ =
                writeln!(out, "sakia_http_requests_total{{status=\"{class}\"}} {}", get(counter));
        }
        out
    }
}
