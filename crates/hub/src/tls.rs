//! Encryption: which implementation, and whose certificates are trusted.

use std::path::PathBuf;
use std::sync::Arc;

use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, TlsConfigBuilder, parse_pem};

use crate::error::HubError;

/// Most bytes of a file of certificates. A whole system's are about 250 KB.
const CERTIFICATES_BYTES: u64 = 16 << 20;

/// What `https` needs on this machine. `certificates` replaces Mozilla's list, as `$SSL_CERT_FILE` does for other tools.
pub(crate) fn config(certificates: Option<PathBuf>) -> Result<TlsConfig, HubError> {
    let roots = match certificates {
        Some(path) => RootCerts::Specific(Arc::new(read(path)?)),
        None => RootCerts::WebPki,
    };
    provider::set(TlsConfig::builder().root_certs(roots)).map(TlsConfigBuilder::build)
}

fn read(path: PathBuf) -> Result<Vec<Certificate<'static>>, HubError> {
    let size = std::fs::metadata(&path).map(|meta| meta.len());
    let read = match size {
        Ok(size) if size > CERTIFICATES_BYTES => Err("it has more than 16 MiB".to_owned()),
        Ok(_) => std::fs::read(&path).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let certificates = read.and_then(|pem| {
        let items: Result<Vec<_>, _> = parse_pem(&pem).collect();
        let items = items.map_err(|error| error.to_string())?;
        let certificates: Vec<_> = items
            .into_iter()
            .filter_map(|item| match item {
                PemItem::Certificate(certificate) => Some(certificate),
                _ => None,
            })
            .collect();
        if certificates.is_empty() { Err("no PEM block".to_owned()) } else { Ok(certificates) }
    });
    certificates.map_err(|problem| HubError::Certificates { path, problem })
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod provider {
    use super::{Arc, HubError, TlsConfigBuilder};

    #[cfg(target_arch = "x86_64")]
    const NEEDED: &str = "AES, PCLMULQDQ, ADX, BMI and AVX2";
    #[cfg(target_arch = "aarch64")]
    const NEEDED: &str = "the AES, SHA-2 and PMULL extensions";

    /// Names the implementation, after a look at the processor: it would end the program on one that it cannot use.
    pub(super) fn set(builder: TlsConfigBuilder) -> Result<TlsConfigBuilder, HubError> {
        let missing: Vec<&str> =
            features().into_iter().filter_map(|(name, has)| (!has).then_some(name)).collect();
        if !missing.is_empty() {
            return Err(HubError::Processor { needed: NEEDED, missing: missing.join(", ") });
        }
        let provider = Arc::new(rustls_graviola::default_provider());
        Ok(builder.unversioned_rustls_crypto_provider(provider))
    }

    #[cfg(target_arch = "x86_64")]
    fn features() -> [(&'static str, bool); 8] {
        use std::arch::is_x86_feature_detected as has;
        [
            ("aes", has!("aes")),
            ("pclmulqdq", has!("pclmulqdq")),
            ("ssse3", has!("ssse3")),
            ("adx", has!("adx")),
            ("bmi1", has!("bmi1")),
            ("bmi2", has!("bmi2")),
            ("avx", has!("avx")),
            ("avx2", has!("avx2")),
        ]
    }

    #[cfg(target_arch = "aarch64")]
    fn features() -> [(&'static str, bool); 4] {
        use std::arch::is_aarch64_feature_detected as has;
        [
            ("neon", has!("neon")),
            ("aes", has!("aes")),
            ("pmull", has!("pmull")),
            ("sha2", has!("sha2")),
        ]
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod provider {
    use super::{HubError, TlsConfigBuilder};

    pub(super) fn set(_: TlsConfigBuilder) -> Result<TlsConfigBuilder, HubError> {
        let missing = std::env::consts::ARCH;
        Err(HubError::Processor {
            needed: "x86-64 or arm64",
            missing: format!("both: it is {missing}"),
        })
    }
}
