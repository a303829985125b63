//! How fast the slot pool decides: plans and commits of a trace, with nothing read.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::{Value, json};
use session::{PoolTime, Trace, time_pool};

use crate::args::{Policy, ProbeArgs};
use crate::{report, simulate};

/// What was found of the pool.
pub(super) struct Pool {
    shape: [u32; 3],
    tokens: u64,
    slots: u32,
    found: Vec<(Policy, PoolTime)>,
}

pub(super) fn measure(args: &ProbeArgs) -> Result<Pool> {
    let trace = match &args.trace {
        Some(path) => {
            simulate::read(path).with_context(|| format!("reading {}", path.display()))?
        }
        None => args.synthetic.trace()?,
    };
    let slots = args.slots.unwrap_or_else(|| usual_slots(&trace));
    let policies = if args.policy.is_empty() { Policy::value_variants() } else { &args.policy[..] };
    let bar = report::count_bar(policies.len() as u64, "policies");
    let mut found = Vec::new();
    for policy in policies {
        found.push((*policy, time_pool(&trace, slots, (*policy).into())?));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let tokens = trace.tokens().iter().sum();
    Ok(Pool { shape: trace.shape(), tokens, slots, found })
}

/// A quarter of all experts, or what a token needs at least.
fn usual_slots(trace: &Trace) -> u32 {
    let [layers, experts, top_k] = trace.shape();
    let all = layers * experts;
    (all / 4).max(top_k + 1).min(all)
}

fn name(policy: Policy) -> String {
    let value = policy.to_possible_value().expect("no policy is hidden");
    value.get_name().to_owned()
}

/// Look-ups a second, and microseconds of a layer's transaction and of a token.
fn rates(time: &PoolTime, tokens: u64) -> [f64; 3] {
    let seconds = time.elapsed.as_secs_f64().max(1e-9);
    let per = |n: u64| 1e6 * seconds / n.max(1) as f64;
    [time.lookups as f64 / seconds, per(time.transactions), per(tokens)]
}

impl Pool {
    pub(super) fn as_json(&self) -> Value {
        let [layers, experts, top_k] = self.shape;
        let policies = self.found.iter().map(|(policy, time)| {
            let [lookups, transaction, token] = rates(time, self.tokens);
            json!({
                "policy": name(*policy), "transactions": time.transactions, "lookups": time.lookups,
                "misses": time.misses, "lookups_per_second": lookups,
                "us_per_transaction": transaction, "us_per_token": token,
            })
        });
        json!({
            "layers": layers, "experts": experts, "top_k": top_k, "tokens": self.tokens,
            "slots": self.slots, "policies": policies.collect::<Vec<_>>(),
        })
    }

    pub(super) fn as_text(&self) -> String {
        let [layers, experts, top_k] = self.shape;
        let mut text = format!(
            "pool: {} slots for {layers} layers of {experts} experts, {top_k} a token; {} tokens\n{:<10} {:>14} {:>14} {:>12} {:>9}\n",
            self.slots, self.tokens, "policy", "look-ups a s", "us a layer", "us a token", "misses"
        );
        for (policy, time) in &self.found {
            let [lookups, transaction, token] = rates(time, self.tokens);
            let misses = 100.0 * time.misses as f64 / time.lookups.max(1) as f64;
            let _ = writeln!(
                text,
                "{:<10} {lookups:>14.0} {transaction:>14.2} {token:>12.1} {misses:>7.1} %",
                name(*policy)
            );
        }
        text
    }
}
