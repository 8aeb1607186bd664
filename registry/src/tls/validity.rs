//! From when until when certificates are good.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use der::Decode as _;
use rustls_pki_types::CertificateDer;
use x509_cert::Certificate;

/// When all certificates of a chain are good together: clients refuse the whole for any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Validity {
    /// The latest beginning.
    from: SystemTime,
    /// The earliest end.
    pub(super) until: SystemTime,
}

/// Why clients will refuse a certificate now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    Expired(Validity),
    Early(Validity),
}

impl Validity {
    /// Reads a chain; nothing when no certificate of it can be read.
    pub(super) fn of(chain: &[CertificateDer<'_>]) -> Option<Self> {
        let after = |since: Duration| UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH);
        let read = |certificate: &CertificateDer<'_>| {
            let validity = Certificate::from_der(certificate).ok()?.tbs_certificate.validity;
            let from = after(validity.not_before.to_unix_duration());
            Some(Self { from, until: after(validity.not_after.to_unix_duration()) })
        };
        chain.iter().filter_map(read).reduce(|all, next| Self {
            from: all.from.max(next.from),
            until: all.until.min(next.until),
        })
    }

    /// Says why clients refuse it at `now`, if they do.
    pub(super) fn doubt(self, now: SystemTime) -> Option<Doubt> {
        if now > self.until {
            Some(Doubt::Expired(self))
        } else if now < self.from {
            Some(Doubt::Early(self))
        } else {
            None
        }
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Expired(validity) | Self::Early(validity)) = self;
        let what = match self {
            Self::Expired(_) => "has expired",
            Self::Early(_) => "is not good yet",
        };
        let date = humantime::format_rfc3339_seconds;
        let (from, until) = (date(validity.from), date(validity.until));
        write!(
            f,
            "the certificate, or one that leads to its authority, {what}: good from {from} to {until}"
        )?;
        f.write_str("; clients refuse it, put another in its place")
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::{Doubt, Validity};

    fn certificate(from: i32, until: i32) -> rustls_pki_types::CertificateDer<'static> {
        let mut params = CertificateParams::new(vec!["r".to_owned()]).unwrap();
        (params.not_before, params.not_after) =
            (date_time_ymd(from, 1, 1), date_time_ymd(until, 1, 1));
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn a_chain_is_good_while_all_of_it_is() {
        let chain = [certificate(2001, 2031), certificate(2011, 2041), certificate(1999, 2021)];
        let validity = Validity::of(&chain).unwrap();
        let at = |year: u64| UNIX_EPOCH + Duration::from_hours((year - 1970) * 8766);
        assert_eq!(validity.doubt(at(2015)), None);
        assert_eq!(validity.doubt(at(2005)), Some(Doubt::Early(validity)));
        let expired = validity.doubt(at(2025));
        assert_eq!(expired, Some(Doubt::Expired(validity)));
        let told = expired.unwrap().to_string();
        for word in ["has expired", "2011-01-01T00:00:00Z", "2021-01-01T00:00:00Z"] {
            assert!(told.contains(word), "{told}");
        }
        assert_eq!(Validity::of(&[]), None);
        assert_eq!(Validity::of(&[vec![1, 2, 3].into()]), None);
    }
}
