//! `[trace]`: where spans are sent (OpenTelemetry's protocol, OTLP).

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use http::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Mistake, Mistakes, Origin, Period, Place};

/// Where spans are sent: a trace says what a request did and how long each part of it took. What is
/// left out here is taken from OpenTelemetry's own names in the environment.
#[derive(Debug, Clone, Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Trace {
    /// URL of a collector. Without it `OTEL_EXPORTER_OTLP_ENDPOINT` says where; with neither,
    /// nothing is traced.
    #[schemars(extend("examples" = ["http://127.0.0.1:4318"]))]
    pub endpoint: Option<String>,
    /// How the collector is spoken to; `http/protobuf` when nothing says otherwise.
    #[schemars(extend("examples" = ["http/protobuf"]))]
    pub protocol: Option<TraceProtocol>,
    /// Which part of the traces that begin here is recorded, from 0 to 1; all when nothing says
    /// otherwise. Of those that a client began, the client decides.
    #[schemars(extend("examples" = [0.1]))]
    pub ratio: Option<f64>,
    /// File of headers that are sent along, one `name: value` on a line; read at the start.
    #[schemars(extend("format" = "file"))]
    pub headers: Option<PathBuf>,
    /// How long the collector may take for what it is sent at once; 10 s when nothing says
    /// otherwise.
    #[schemars(extend("examples" = ["10s"]))]
    pub timeout: Option<Period>,
}

/// How a collector is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum TraceProtocol {
    /// Protocol buffers over HTTP, usually on port 4318.
    #[serde(rename = "http/protobuf")]
    Http,
    /// gRPC, usually on port 4317.
    #[serde(rename = "grpc")]
    Grpc,
}

/// What OpenTelemetry's names in the environment say. The library reads the others by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standard {
    endpoint: bool,
    off: bool,
    protocol: Option<String>,
    service: Option<String>,
}

impl Trace {
    pub(super) fn check(&self, mistakes: &mut Mistakes<'_>) {
        if let Some(url) = &self.endpoint {
            // Tells nothing of the URL itself: what it holds may be secret.
            let uri: Option<Uri> = url.parse().ok();
            let scheme = uri.as_ref().and_then(Uri::scheme_str);
            match uri.as_ref().and_then(Uri::authority).zip(scheme) {
                Some((authority, _)) if authority.as_str().contains('@') => {
                    mistakes.add("endpoint", "holds credentials; write them into headers' file");
                }
                Some((_, "http" | "https")) => {}
                _ => mistakes.add("endpoint", "is no URL; write \"http://127.0.0.1:4318\""),
            }
        }
        if self.ratio.is_some_and(|ratio| !(0.0..=1.0).contains(&ratio)) {
            mistakes.add("ratio", "is out of range; write a number from 0 to 1");
        }
        if self.headers.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            mistakes.add("headers", "is empty; name a file, or leave the setting out");
        }
        if let Some(timeout) = self.timeout {
            let second = Duration::from_secs(1);
            timeout.check(second / 10..=second * 60, "timeout", mistakes);
        }
    }

    /// Whether anything is to be traced.
    pub fn is_on(&self, standard: &Standard) -> bool {
        !standard.off && (self.endpoint.is_some() || standard.endpoint)
    }

    /// Returns how the collector is spoken to.
    pub fn protocol(&self, standard: &Standard) -> Result<TraceProtocol, Mistake> {
        match (self.protocol, standard.protocol.as_deref()) {
            (Some(protocol), _) => Ok(protocol),
            (None, None | Some("http/protobuf")) => Ok(TraceProtocol::Http),
            (None, Some("grpc")) => Ok(TraceProtocol::Grpc),
            (None, Some(other)) => Err(Mistake {
                place: Place {
                    origin: Origin::Environment("OTEL_EXPORTER_OTLP_PROTOCOL".to_owned()),
                    at: None,
                },
                setting: String::new(),
                told: format!("{other:?} is not spoken here; write http/protobuf or grpc"),
            }),
        }
    }
}

impl Standard {
    /// Reads the environment.
    pub fn read() -> Self {
        Self::of(std::env::vars_os())
    }

    fn of(environment: impl Iterator<Item = (OsString, OsString)>) -> Self {
        let mut read = Self::default();
        let mut special = None;
        for (name, value) in environment {
            let (Some(name), Some(value)) = (name.to_str(), value.to_str()) else { continue };
            // Empty is as if it were not there.
            if value.is_empty() {
                continue;
            }
            let text = || Some(value.to_owned());
            match name {
                "OTEL_EXPORTER_OTLP_ENDPOINT" | "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" => {
                    read.endpoint = true;
                }
                "OTEL_SDK_DISABLED" => read.off |= value.eq_ignore_ascii_case("true"),
                "OTEL_TRACES_EXPORTER" => read.off |= value == "none",
                "OTEL_EXPORTER_OTLP_PROTOCOL" => read.protocol = text(),
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL" => special = text(),
                "OTEL_SERVICE_NAME" => read.service = text(),
                _ => {}
            }
        }
        read.protocol = special.or(read.protocol);
        read
    }

    /// Returns what the service is called in traces.
    pub fn service(&self) -> &str {
        self.service.as_deref().unwrap_or("kybernate-registry")
    }
}

#[cfg(test)]
mod tests {
    use super::{Standard, Trace, TraceProtocol};

    fn standard(names: &[(&str, &str)]) -> Standard {
        Standard::of(names.iter().map(|(name, value)| (name.into(), value.into())))
    }

    #[test]
    fn traces_are_off_until_somebody_says_where_they_go() {
        let (empty, set) =
            (Trace::default(), Trace { endpoint: Some("http://h".to_owned()), ..Trace::default() });
        let named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h");
        assert!(!empty.is_on(&standard(&[])));
        assert!(!empty.is_on(&standard(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "")])));
        assert!(empty.is_on(&standard(&[named])));
        assert!(empty.is_on(&standard(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://h")])));
        assert!(set.is_on(&standard(&[])));
        for off in [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert!(!empty.is_on(&standard(&[named, off])) && !set.is_on(&standard(&[off])));
        }
        assert!(set.is_on(&standard(&[("OTEL_SDK_DISABLED", "yes")])));
    }

    #[test]
    fn the_protocol_is_the_nearest_that_is_named() {
        let general = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf");
        let empty = Trace::default();
        let protocol = |names: &[_]| empty.protocol(&standard(names)).ok();
        assert_eq!(protocol(&[]), Some(TraceProtocol::Http));
        assert_eq!(protocol(&[general]), Some(TraceProtocol::Grpc));
        assert_eq!(protocol(&[own, general]), Some(TraceProtocol::Http));
        assert_eq!(protocol(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")]), None);
        let set = Trace { protocol: Some(TraceProtocol::Grpc), ..Trace::default() };
        assert_eq!(set.protocol(&standard(&[own])).ok(), Some(TraceProtocol::Grpc));
    }

    #[test]
    fn a_service_has_the_name_it_is_given() {
        assert_eq!(standard(&[]).service(), "kybernate-registry");
        assert_eq!(standard(&[("OTEL_SERVICE_NAME", "cache")]).service(), "cache");
    }
}
