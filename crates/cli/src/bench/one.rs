//! One run: load, read the prompt, force the ids; then what bounds it.

use std::time::Instant;

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;
use session::receipt::{self, PhaseReceipt};
use session::{Forced, Reads, Receipt, Roofline};

use super::{Setting, Work};
use crate::args::{BenchArgs, MemoryArgs};
use crate::{lookahead, machine, open};

/// A receipt with what the run was.
#[derive(Serialize)]
struct Run {
    #[serde(flatten)]
    receipt: Receipt,
    /// The same again, with the pool as the first time left it.
    #[serde(skip_serializing_if = "Option::is_none")]
    warm: Option<Again>,
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline: Option<Roofline>,
    bench: Bench,
}

#[derive(Serialize)]
struct Again {
    prefill: PhaseReceipt,
    decode: PhaseReceipt,
    token_us: Vec<u64>,
}

#[derive(Serialize)]
struct Bench {
    prompt_tokens: usize,
    decode_tokens: usize,
    /// Of the ids that were run: receipts of different ids do not compare.
    ids_hash: String,
    /// From the start of the command to a model that can be asked.
    load_us: u64,
    /// The same to the first token after the prompt.
    first_token_us: u64,
    /// Processes that ran or wanted to, averaged over the minute before.
    load_before: Option<f64>,
    machine: Value,
}

pub(crate) fn run(
    args: &BenchArgs,
    work: &Work,
    setting: Setting,
    roofline: bool,
) -> Result<Value> {
    let (since, load_before) = (Instant::now(), machine::load_average());
    let Setting { memory, context, prompt_tokens } = setting;
    let needed = prompt_tokens + work.decode_tokens;
    let chosen = open::choose(&args.model)?;
    let memory = MemoryArgs { memory, context, kv: args.kv, slots: args.slots };
    let mut options = open::options(&chosen, &memory, Some(&args.speed))?;
    options.context = options.context.or(Some(needed as u32));
    let opened = open::open(&chosen)?;
    lookahead::attach(&args.speed, &opened, &mut options)?;
    if args.simulate_disk.is_some() {
        options.simulate = args.simulate_disk;
        // What is known of this machine's disk does not hold for another.
        options.reads = options.reads.or(Some(Reads::default()));
    }
    options.speculation = args.speculation.options(opened.model.draft.is_some());
    let mut engine = open::load(opened, options)?;
    let load_us = since.elapsed().as_micros() as u64;
    let mut sequence = engine.open_sequence()?;
    let ids = &work.ids[..needed];
    let (prompt, forced) = ids.split_at(prompt_tokens);
    let job = Forced { prompt, forced, pass_rows: engine.plan.pass_rows as usize };
    let outcome = job.run(&mut engine.network, &mut sequence)?;
    let receipt = receipt::of_forced(&engine, &outcome);
    let warm = if args.warm {
        let again = job.run(&mut engine.network, &mut sequence)?;
        let (prefill, decode) = ((&again.prefill).into(), (&again.decode).into());
        Some(Again { prefill, decode, token_us: again.token_us })
    } else {
        None
    };
    let roofline = roofline.then(|| engine.roofline(sequence, &receipt.decode));
    let bench = Bench {
        prompt_tokens,
        decode_tokens: work.decode_tokens,
        ids_hash: receipt::hash_tokens(ids),
        load_us,
        first_token_us: load_us + receipt.prefill.elapsed_us,
        load_before,
        machine: machine::brief(),
    };
    Ok(serde_json::to_value(Run { receipt, warm, roofline, bench })?)
}
