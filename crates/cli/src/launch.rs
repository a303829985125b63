//! `sakia launch`: a coding agent that is installed here, wired to the local server.
//!
//! By environment and arguments alone: no file of the agent is touched, so that without `sakia` it is what it was.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::args::LaunchArgs;
use crate::report;

/// The agents: one data file.
const AGENTS: &str = include_str!("agents.json");
/// Most bytes of the server's answer.
const MAX_ANSWER: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(5);

/// How an agent is wired.
#[derive(Debug, Deserialize)]
struct Agent {
    about: String,
    program: String,
    /// Tokens without which it is of no use.
    context: u64,
    env: BTreeMap<String, String>,
    args: Vec<String>,
}

/// What its settings speak of.
struct Wiring {
    root: String,
    key: String,
    model: String,
    context: u64,
}

impl Wiring {
    fn fill(&self, text: &str) -> String {
        text.replace("{root}", &self.root)
            .replace("{key}", &self.key)
            .replace("{model}", &self.model)
            .replace("{context}", &self.context.to_string())
    }
}

pub(crate) fn run(args: &LaunchArgs) -> Result<ExitCode> {
    let agents: BTreeMap<String, Agent> = serde_json::from_str(AGENTS).context("agents.json")?;
    let Some(name) = &args.agent else {
        for (name, agent) in &agents {
            report::data(&format!("{name:10}{} ({})\n", agent.about, agent.program));
        }
        return Ok(ExitCode::SUCCESS);
    };
    let Some(agent) = agents.get(name) else {
        let known: Vec<&str> = agents.keys().map(String::as_str).collect();
        bail!("`{name}` is not an agent that is known here; there are: {}", known.join(", "));
    };
    let key = args.api_key.clone().or_else(|| std::env::var("SAKIA_API_KEY").ok());
    let key = key.filter(|key| !key.is_empty()).unwrap_or_else(|| "sakia".to_owned());
    let root = format!("http://{}", args.server);
    let (model, context) = match (&args.model, args.dry_run) {
        // Nothing is asked of a server that need not run.
        (Some(model), true) => (model.clone(), agent.context),
        _ => ask(args, &key)?,
    };
    let wiring = Wiring { root, key, model, context };
    if context < agent.context {
        report::note(&format!(
            "warning: {} wants a context of {} tokens and the server has {context}; start it with `sakia serve --context {}`",
            agent.about, agent.context, agent.context
        ));
    }
    let mut command = Command::new(&agent.program);
    let env: Vec<(&String, String)> =
        agent.env.iter().map(|(name, value)| (name, wiring.fill(value))).collect();
    let own: Vec<String> = agent.args.iter().map(|arg| wiring.fill(arg)).collect();
    command.envs(env.iter().map(|(name, value)| (*name, value))).args(&own).args(&args.rest);
    if args.dry_run {
        for (name, value) in &env {
            report::data(&format!("{name}={}\n", quoted(value)));
        }
        let words = std::iter::once(&agent.program).chain(&own).chain(&args.rest);
        let words: Vec<String> = words.map(|word| quoted(word)).collect();
        report::data(&format!("{}\n", words.join(" ")));
        return Ok(ExitCode::SUCCESS);
    }
    let status = command
        .status()
        .with_context(|| format!("starting `{}`: is {} installed?", agent.program, agent.about))?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// The model, and the context of the one that is loaded. Loads it: an agent would wait for it anyway.
fn ask(args: &LaunchArgs, key: &str) -> Result<(String, u64)> {
    let models = get(args.server, "GET", "/v1/models", key, "")?;
    let listed = models["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Vec<&str> = listed.iter().filter_map(|model| model["id"].as_str()).collect();
    let model = match &args.model {
        Some(model) if names.contains(&model.as_str()) => model.clone(),
        Some(model) => bail!("the server has no model `{model}`; there are: {}", names.join(", ")),
        None => (*names.first().context("the server has no model")?).to_owned(),
    };
    let load = serde_json::json!({ "model": model }).to_string();
    get(args.server, "POST", "/api/generate", key, &load)?;
    let running = get(args.server, "GET", "/api/ps", key, "")?;
    let context = running["models"][0]["context_length"].as_u64().unwrap_or(0);
    Ok((model, context))
}

/// One request to the local server.
fn get(server: SocketAddr, method: &str, path: &str, key: &str, body: &str) -> Result<Value> {
    let hint = "hint: start it with `sakia serve`, or name another one with --server";
    let mut stream = TcpStream::connect_timeout(&server, PATIENCE)
        .with_context(|| format!("nobody serves at {server}\n\n{hint}"))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {server}\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer).context("reading the server's answer")?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the server's answer has no head")?;
    let value: Value = serde_json::from_str(body)
        .with_context(|| format!("{server} is not a server of this kind\n\n{hint}"))?;
    if !head.starts_with("HTTP/1.1 200") {
        let error = &value["error"];
        let message = error.as_str().or_else(|| error["message"].as_str()).unwrap_or("no reason");
        bail!("the server refuses {path}: {message}");
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_agent_is_wired_to_the_server_and_nothing_is_left_open() {
        let agents: BTreeMap<String, Agent> = serde_json::from_str(AGENTS).unwrap();
        let wiring = Wiring {
            root: "http://127.0.0.1:1".to_owned(),
            key: "secret".to_owned(),
            model: "org/name".to_owned(),
            context: 5,
        };
        for (name, agent) in agents {
            let all = agent.env.values().chain(&agent.args).map(|text| wiring.fill(text));
            let all = all.collect::<Vec<_>>().join(" ");
            assert!(all.contains("http://127.0.0.1:1"), "{name}: {all}");
            assert!(all.contains("org/name") && all.contains("secret"), "{name}: {all}");
            for left in ["{root}", "{key}", "{model}", "{context}"] {
                assert!(!all.contains(left), "{name}: {all}");
            }
        }
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("a=b"), "a=b");
        assert_eq!(quoted("it's {"), "'it'\\''s {'");
    }
}
