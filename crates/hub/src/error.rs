//! What can go wrong between a host and the store.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use units::Bytes;

/// Why a model was not listed, fetched or found. No message ever holds a token.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Text that names no repository.
    #[error("`{found}` is no model: {problem}; write it as org/name or org/name:Q4_K_M")]
    Name {
        /// The text, escaped.
        found: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A base address that cannot be used.
    #[error("`{found}` is no host: {problem}; write it like https://huggingface.co")]
    Host {
        /// The text, escaped.
        found: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A revision that no repository can have.
    #[error("`{found}` is no revision: {problem}; write a branch, a tag or a commit")]
    Revision {
        /// The text, escaped.
        found: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Something that was called a token cannot be sent as one.
    #[error(
        "the token in {origin} is not one: it is empty, or longer than 1024 characters, or holds spaces or odd characters"
    )]
    Token {
        /// A variable or a file.
        origin: String,
    },
    /// No folder for the store.
    #[error(
        "neither `$SAKIA_HOME` nor `$HOME` is set, so there is no place for models\n\nhint: set `SAKIA_HOME`"
    )]
    NoHome,
    /// This processor cannot encrypt.
    #[error(
        "https needs a processor with {needed}, and this one lacks {missing}\n\n\
         hint: fetch the model on another machine and use `-m PATH`"
    )]
    Processor {
        /// What the encryption is written for.
        needed: &'static str,
        /// What was not found.
        missing: String,
    },
    /// `$SSL_CERT_FILE` cannot be used.
    #[error("`$SSL_CERT_FILE` is {}, which holds no certificates: {problem}", path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The host did not answer, or broke off, again and again.
    #[error("{host} gave no {what} after {tries} tries; the last one ended with: {last}")]
    Unreachable {
        /// Which host.
        host: String,
        /// What was asked for.
        what: String,
        /// How often.
        tries: u32,
        /// The last failure.
        last: String,
    },
    /// The connection cannot be trusted or made.
    #[error("no connection to {host}: {problem}")]
    Connection {
        /// Which host.
        host: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The host wants us to wait for longer than a program should.
    #[error(
        "{host} is asked too often and wants {} s of quiet; {} s are the most that is waited\n\n\
         hint: run the same command later, it goes on where it stopped; with a token (`HF_TOKEN`) the limit is higher",
        wait.as_secs(), most.as_secs()
    )]
    Busy {
        /// Which host.
        host: String,
        /// What it asks for.
        wait: Duration,
        /// What is allowed.
        most: Duration,
    },
    /// 401 and 403.
    #[error("{host} refuses {what} ({status}): {reason}\n\nhint: {hint}")]
    Refused {
        /// Which host.
        host: String,
        /// What was asked for.
        what: String,
        /// The number it answered with.
        status: u16,
        /// What that means.
        reason: &'static str,
        /// What to do.
        hint: String,
    },
    /// 404.
    #[error("{host} has no {what}\n\nhint: {hint}")]
    NotFound {
        /// Which host.
        host: String,
        /// What was asked for.
        what: String,
        /// What to look at.
        hint: &'static str,
    },
    /// An answer that means nothing here.
    #[error("{host} answered {status} to the request for {what}")]
    Status {
        /// Which host.
        host: String,
        /// What was asked for.
        what: String,
        /// The number it answered with.
        status: u16,
    },
    /// A redirect that is not followed.
    #[error("{from} redirects {what} in a way that is not followed: {problem}")]
    Redirect {
        /// The host that redirects.
        from: String,
        /// What was asked for.
        what: String,
        /// Why not.
        problem: String,
    },
    /// A list of files that is none.
    #[error("{host} gives a list of files for {repo} that cannot be used: {problem}")]
    Listing {
        /// Which host.
        host: String,
        /// The repository.
        repo: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A file name that could do harm.
    #[error("the repository holds a file named `{path}`, which is refused: {problem}")]
    UnsafePath {
        /// The name, escaped and cut.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Nothing to fetch.
    #[error("{repo} holds no model that can be read: safetensors or GGUF is needed, found {found}")]
    NoModel {
        /// The repository.
        repo: String,
        /// What it holds, by ending.
        found: String,
    },
    /// More than one quantisation, and none was chosen; or none fits the choice.
    #[error("{problem}; {repo} has\n{choices}\n\nhint: {command} {repo}:{example}")]
    Choice {
        /// The repository.
        repo: String,
        /// Why a choice is needed.
        problem: String,
        /// One line for each, with its size.
        choices: String,
        /// What the choice is typed after.
        command: &'static str,
        /// The first of them.
        example: String,
    },
    /// A quantisation of a model that has none.
    #[error("{repo} has no GGUF file, so no {variant}\n\nhint: leave `:{variant}` away")]
    NoVariants {
        /// The repository.
        repo: String,
        /// What was asked for.
        variant: String,
    },
    /// Patterns that match nothing of use.
    #[error("`{pattern}` matches no file of {repo} that can be used; weights there: {found}")]
    NoMatch {
        /// The repository.
        repo: String,
        /// The pattern.
        pattern: String,
        /// What it holds.
        found: String,
    },
    /// A model in parts of which some are missing.
    #[error("{repo} is incomplete: {found} of the {needed} parts of {path} are there")]
    MissingParts {
        /// The repository.
        repo: String,
        /// The first part that is there.
        path: String,
        /// Parts listed.
        found: u32,
        /// Parts by name.
        needed: u32,
    },
    /// Not enough room.
    #[error(
        "{needed} are still to be fetched, but the disk of {} has {free} free\n\nhint: free {}, or put the store on \
         another disk with `SAKIA_HOME`",
        folder.display(), needed.saturating_sub(*free)
    )]
    Space {
        /// Where the model goes.
        folder: PathBuf,
        /// What is still to come.
        needed: Bytes,
        /// What is free.
        free: Bytes,
    },
    /// Another process is at it.
    #[error("another pull of {repo} is running{}; it holds {}", by(*process), lock.display())]
    Locked {
        /// The repository.
        repo: String,
        /// The lock.
        lock: PathBuf,
        /// The process that wrote its number into it.
        process: Option<u32>,
    },
    /// The disk.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Which file or folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Bytes that are not the ones promised.
    #[error(
        "{path} is not what the host promised, also when fetched again: its {kind} is {found}, needed {needed}"
    )]
    Hash {
        /// The file.
        path: String,
        /// Which hash.
        kind: &'static str,
        /// Of what was received.
        found: String,
        /// From the list of files.
        needed: String,
    },
    /// A length that is not the one promised.
    #[error("{path} has {needed} bytes by the list of files, but {host} sends {found}")]
    Length {
        /// The file.
        path: String,
        /// Who sent it.
        host: String,
        /// What came.
        found: String,
        /// From the list of files.
        needed: u64,
    },
    /// The user stopped it.
    #[error("stopped{}", so_far(*done, *total))]
    Stopped {
        /// Bytes on disk.
        done: Bytes,
        /// Bytes in all; 0 while that is not known.
        total: Bytes,
    },
    /// Not in the store.
    #[error("{name} is neither a file nor in the store at {}\n\nhint: sakia pull {name}", store.display())]
    NotPulled {
        /// The model.
        name: String,
        /// The store.
        store: PathBuf,
    },
    /// In the store, but in another form.
    #[error("{name} is not in the store, which has {found} of it\n\nhint: sakia pull {name}")]
    OtherVariant {
        /// The model.
        name: String,
        /// What is there.
        found: String,
    },
    /// In the store, but not whole.
    #[error("{name} in the store is incomplete: {problem}\n\nhint: sakia pull {name}")]
    Incomplete {
        /// The model.
        name: String,
        /// What is missing.
        problem: String,
    },
    /// A record that we did not write.
    #[error("{} is damaged: {problem}\n\nhint: remove it and pull the model again; files that are whole stay", path.display())]
    Record {
        /// The record.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

impl HubError {
    /// A word for programs.
    pub const fn class(&self) -> &'static str {
        match self {
            Self::Unreachable { .. }
            | Self::Connection { .. }
            | Self::Busy { .. }
            | Self::Status { .. }
            | Self::Redirect { .. } => "network",
            Self::Refused { .. } => "access",
            Self::NotFound { .. } | Self::NotPulled { .. } | Self::OtherVariant { .. } => {
                "not-found"
            }
            Self::Listing { .. }
            | Self::UnsafePath { .. }
            | Self::Hash { .. }
            | Self::Length { .. }
            | Self::MissingParts { .. } => "host",
            Self::NoModel { .. } | Self::NoVariants { .. } => "unsupported",
            Self::Space { .. } => "limit",
            Self::Io { .. } | Self::Record { .. } | Self::Incomplete { .. } => "io",
            Self::Locked { .. } => "busy",
            Self::Stopped { .. } => "stopped",
            Self::Name { .. }
            | Self::Host { .. }
            | Self::Revision { .. }
            | Self::Token { .. }
            | Self::NoHome
            | Self::Processor { .. }
            | Self::Certificates { .. }
            | Self::Choice { .. }
            | Self::NoMatch { .. } => "config",
        }
    }

    /// Turns what the system said into an error that names the file.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

fn by(process: Option<u32>) -> String {
    process.map(|id| format!(" in process {id}")).unwrap_or_default()
}

fn so_far(done: Bytes, total: Bytes) -> String {
    if total == Bytes::ZERO {
        return " before anything was fetched".to_owned();
    }
    format!(
        " with {done} of {total} here\n\nhint: run the same command again, it goes on from there"
    )
}
