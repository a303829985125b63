//! Official clients against `sakia serve` with the demo model, in a folder of their own under `target/`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::check::{Part, sequence};
use crate::shell::{Outcome, answers, cargo, run};
use crate::workspace::Workspace;

/// Scripts, and the program that runs them.
const SCRIPTS: [(&str, bool); 5] = [
    ("openai_sdk.py", true),
    ("anthropic_sdk.py", true),
    ("ollama_sdk.py", true),
    ("openai_node.mjs", false),
    ("ai_node.mjs", false),
];
/// What may not be: an answer of 5xx, or one that the description does not have.
const CHECKS: &str = "not_a_server_error,content_type_conformance,status_code_conformance,response_schema_conformance";
/// Clients of a soak.
const CLIENTS: &str = "64";

/// What is asked for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wanted {
    schemathesis: Option<u32>,
    soak: Option<u32>,
    /// The program, instead of one that is built.
    bin: Option<PathBuf>,
    /// Leave the clients' own tests out.
    only: bool,
}

impl Wanted {
    fn of(args: &[String]) -> Result<Self> {
        let mut wanted = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().with_context(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--schemathesis" => {
                    wanted.schemathesis = Some(value()?.parse().context("seconds")?);
                }
                "--soak" => wanted.soak = Some(value()?.parse().context("seconds")?),
                "--bin" => wanted.bin = Some(value()?.into()),
                "--only" => wanted.only = true,
                _ => bail!(
                    "`{arg}` is no option; there are: --schemathesis SECONDS, --soak SECONDS, --bin PROGRAM, --only"
                ),
            }
        }
        Ok(wanted)
    }
}

/// Where the clients are.
struct Clients {
    scripts: PathBuf,
    python: PathBuf,
    folder: PathBuf,
}

/// Installs the clients and runs their scripts.
pub(crate) fn sdks(workspace: &Workspace, args: &[String]) -> Result<Outcome> {
    let wanted = Wanted::of(args)?;
    for (program, version) in
        [("python3", "--version"), ("npm", "--version"), ("node", "--version")]
    {
        if !answers(program, &[version]) {
            return Ok(Outcome::Skipped(format!(
                "no {program}; the clients need Python 3 and Node"
            )));
        }
    }
    let bin = match &wanted.bin {
        Some(bin) => bin.clone(),
        None => build(workspace)?,
    };
    let clients = install(workspace)?;
    let with_server = |act: &dyn Fn(&Server) -> Result<()>| {
        let server = Server::start(&bin, &workspace.root)?;
        act(&server).map(|()| Outcome::Done)
    };
    let (with_server, clients) = (&with_server, &clients);
    let mut parts = Vec::new();
    for (script, is_python) in SCRIPTS.into_iter().filter(|_| !wanted.only) {
        parts.push(Part::new(script, move || {
            with_server(&|server| {
                let mut command =
                    if is_python { Command::new(&clients.python) } else { Command::new("node") };
                // Node looks for modules beside the script.
                let folder = if is_python { &clients.scripts } else { &clients.folder };
                run(command.arg(folder.join(script)).env("SAKIA_URL", &server.url))
            })
        }));
    }
    if let Some(seconds) = wanted.schemathesis {
        parts.push(Part::new("schemathesis", move || {
            with_server(&|server| clients.schemathesis(server, seconds))
        }));
    }
    if let Some(seconds) = wanted.soak {
        parts.push(Part::new("soak", move || {
            with_server(&|server| {
                let script = clients.scripts.join("soak.py");
                let mut command = Command::new(&clients.python);
                command.arg(script).arg(seconds.to_string()).arg(CLIENTS);
                command.env("SAKIA_URL", &server.url);
                run(command.env("SAKIA_PID", server.process.id().to_string()))
            })
        }));
    }
    sequence(&parts)
}

fn build(workspace: &Workspace) -> Result<PathBuf> {
    run(cargo().args(["build", "--release", "--locked", "-p", "cli"]))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = target.unwrap_or_else(|| workspace.root.join("target"));
    Ok(target.join("release").join("sakia"))
}

fn install(workspace: &Workspace) -> Result<Clients> {
    let scripts = workspace.root.join("tools/sdks");
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let folder = target.unwrap_or_else(|| workspace.root.join("target")).join("sdks");
    let venv = folder.join("venv");
    let python = venv.join("bin").join("python");
    std::fs::create_dir_all(&folder).context("making the folder of the clients")?;
    if !python.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    let requirements = scripts.join("requirements.txt");
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(requirements))?;
    for file in ["package.json", "openai_node.mjs", "ai_node.mjs"] {
        std::fs::copy(scripts.join(file), folder.join(file)).with_context(|| file.to_owned())?;
    }
    run(Command::new("npm").args(["install", "--silent", "--no-audit"]).current_dir(&folder))?;
    Ok(Clients { scripts, python, folder })
}

impl Clients {
    /// Requests made from the server's own description.
    fn schemathesis(&self, server: &Server, seconds: u32) -> Result<()> {
        let mut command = Command::new(self.python.with_file_name("schemathesis"));
        command.arg("run").arg(format!("{}/openapi.json", server.url));
        command.args(["--max-time", &seconds.to_string(), "--max-examples", "100000"]);
        command.args(["--checks", CHECKS, "--request-timeout", "120"]);
        run(command.current_dir(&self.folder))
    }
}

/// A server with the demo model, on a port of its own.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    fn start(bin: &Path, root: &Path) -> Result<Self> {
        let mut process = Command::new(bin)
            .args(["serve", "--only", "--port", "0", "--sequences", "4"])
            .args(["--memory", "128MiB", "--context", "1024", "--queue", "256"])
            .current_dir(root)
            .env_remove("SAKIA_MODEL")
            .env_remove("SAKIA_API_KEY")
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", bin.display()))?;
        let mut url = String::new();
        let stdout = process.stdout.take().context("the server has no output")?;
        let read = BufReader::new(stdout).read_line(&mut url);
        let server = Self { process, url: url.trim().to_owned() };
        read.context("reading the server's address")?;
        if !server.url.starts_with("http://") {
            bail!("the server did not start");
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It has nothing to save.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_and_others_refused() {
        let wanted = |args: &[&str]| {
            Wanted::of(&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(wanted(&["--soak", "9"]).unwrap().soak, Some(9));
        assert!(wanted(&["--soak"]).is_err());
        assert!(wanted(&["--fast"]).is_err());
    }
}
