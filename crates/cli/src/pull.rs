//! `sakia pull`: a model repository into the local store.

use std::fmt::Write;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use hub::{
    DEFAULT_HOST, Host, Hub, HubError, Plan, Progress, Pulled, Request, Stop, Store, Token, Tuning,
};
use indicatif::ProgressBar;
use units::Bytes;

use crate::args::PullArgs;
use crate::{interrupt, report};

/// Exit code of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

pub(crate) fn run(args: &PullArgs) -> Result<ExitCode> {
    let env = |name: &str| std::env::var_os(name);
    let hub = hub(args, &env)?;
    let (name, revision) = (args.model.parse()?, args.revision.clone());
    let request = Request { name, revision, include: args.include.clone() };
    let result = hub.plan(&request).and_then(|plan| {
        if args.dry_run {
            if args.json {
                report::data(&plan_json(&plan));
            } else {
                report::text(&plan_text(&plan));
            }
            return Ok(());
        }
        let bar = Bar::new(&plan);
        let pulled = hub.pull(&plan, &bar);
        bar.0.finish_and_clear();
        let pulled = pulled?;
        report::data(&if args.json { pulled_json(&pulled) } else { pulled_text(&plan, &pulled) });
        Ok(())
    });
    match result {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ HubError::Stopped { .. }) => {
            let error = error.into();
            if args.json {
                report::json_error(&error);
            }
            report::error(&error);
            Ok(ExitCode::from(INTERRUPTED))
        }
        Err(error) => Err(error.into()),
    }
}

fn hub(args: &PullArgs, env: &dyn Fn(&str) -> Option<std::ffi::OsString>) -> Result<Hub, HubError> {
    let text = |name: &str| env(name).map(|value| value.to_string_lossy().into_owned());
    let set = |name: &str| text(name).filter(|value| !value.is_empty());
    let host = args.host.clone().or_else(|| set("HF_ENDPOINT"));
    let host: Host = host.as_deref().unwrap_or(DEFAULT_HOST).parse()?;
    let token = Token::find(env)?;
    let certificates = env("SSL_CERT_FILE").filter(|path| !path.is_empty()).map(Into::into);
    let tuning = Tuning { connections: usize::from(args.connections), ..Tuning::default() };
    let store = Store::from_environment(env)?;
    Hub::new(host, token.as_ref(), certificates, store, tuning, &Stop::new(interrupt::pressed))
}

/// A bar over the bytes of a pull. Hidden, with its remarks, where no terminal shows it.
struct Bar(ProgressBar);

impl Bar {
    fn new(plan: &Plan) -> Self {
        Self(report::pull_bar(plan.total()))
    }
}

impl Progress for Bar {
    fn begins(&self, total: u64, present: u64) {
        self.0.set_length(total);
        self.0.set_position(present);
        // What was here before is no speed.
        self.0.reset_eta();
    }

    fn at(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    fn verifying(&self, path: &str) {
        self.0.set_message(format!("checking {path}"));
    }

    fn verified(&self) {
        self.0.set_message("");
    }

    fn remark(&self, text: &str) {
        if std::io::stderr().is_terminal() {
            self.0.println(text);
        }
    }
}

fn plan_text(plan: &Plan) -> String {
    let mut text = format!("{} at {}\n", plan.repo, plan.commit);
    let width = plan.files.iter().map(|file| file.wanted.path.as_str().chars().count());
    let width = width.max().unwrap_or(0);
    for file in &plan.files {
        let (path, size) = (file.wanted.path.as_str(), Bytes(file.wanted.size));
        let _ = write!(text, "  {path:width$}  {size:>10}");
        if file.present > 0 {
            let _ = write!(text, "  {} here", Bytes(file.present));
        }
        text.push('\n');
    }
    let _ = writeln!(text, "  {:width$}  {:>10}", "total", Bytes(plan.total()));
    let left = Bytes(plan.total() - plan.present());
    let _ = writeln!(text, "{left} to fetch, into {}", plan.folder.display());
    text
}

fn plan_json(plan: &Plan) -> String {
    let files = plan.files.iter().map(|file| {
        serde_json::json!({
            "path": file.wanted.path,
            "size": file.wanted.size,
            "hash": file.wanted.hash,
            "present": file.present,
        })
    });
    let value = serde_json::json!({
        "repo": plan.repo.to_string(),
        "revision": plan.commit,
        "folder": report::lossy(&plan.folder),
        "files": files.collect::<Vec<_>>(),
        "total_bytes": plan.total(),
        "remaining_bytes": plan.total() - plan.present(),
    });
    format!("{value:#}\n")
}

fn pulled_text(plan: &Plan, pulled: &Pulled) -> String {
    let (fetched, total) = (Bytes(pulled.fetched), Bytes(plan.total()));
    let files = plan.files.len();
    report::note(&format!("{fetched} fetched, {total} in {files} files, all verified"));
    format!("{}\n", pulled.model.display())
}

fn pulled_json(pulled: &Pulled) -> String {
    let value = serde_json::json!({
        "repo": pulled.snapshot.repo,
        "revision": pulled.snapshot.revision,
        "model": report::lossy(&pulled.model),
        "files": pulled.snapshot.files,
        "fetched_bytes": pulled.fetched,
    });
    format!("{value:#}\n")
}
