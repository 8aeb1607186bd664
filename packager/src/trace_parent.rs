//! The trace that requests belong to (W3C Trace Context).
//!
//! `kyb` and the agent pass on the place in somebody's trace that they are given, or begin a trace, so
//! that what an operation asks of registries is found together in their traces, and by its id in
//! their logs, whether or not they export [`spans`](crate::spans) of their own.

use std::fmt;
use std::str::FromStr;

use opentelemetry::trace::{SpanContext, TraceFlags, TraceState};
use opentelemetry_sdk::trace::{IdGenerator as _, RandomIdGenerator};

tokio::task_local! {
    static CURRENT: TraceParent;
}

/// A place in a trace, as the header `traceparent` has it.
///
/// ```text
/// 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01      version, trace, span, flags
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceParent(Box<str>);

/// A text is no place in a trace.
#[derive(Debug, thiserror::Error)]
#[error("not a traceparent of W3C's Trace Context")]
pub struct TraceParentError;

impl TraceParent {
    /// The name of the header, and of the metadata of a call.
    pub const HEADER: &str = "traceparent";
    /// The name in the environment.
    pub const VARIABLE: &str = "TRACEPARENT";

    /// Begins a trace that is to be recorded: operations are few, and each of them matters.
    pub fn random() -> Self {
        let ids = RandomIdGenerator::default();
        let (trace, span) = (ids.new_trace_id(), ids.new_span_id());
        let state = TraceState::default();
        Self::of(&SpanContext::new(trace, span, TraceFlags::SAMPLED, false, state))
    }

    /// Returns the place of a span.
    pub(crate) fn of(span: &SpanContext) -> Self {
        let (trace, id, flags) = (span.trace_id(), span.span_id(), span.trace_flags());
        Self(format!("00-{trace}-{id}-{flags:02x}").into())
    }

    /// Returns the id of the trace.
    pub fn trace_id(&self) -> &str {
        self.0.get(3..35).unwrap_or_default()
    }

    /// Returns the header's value.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the one that the work under way belongs to.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// Does `work` as a part of the trace. Registries that are opened by it are told.
    pub fn around<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self, work)
    }
}

impl FromStr for TraceParent {
    type Err = TraceParentError;

    /// Of a later version the part that this one knows is taken.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.splitn(5, '-');
        let mut part = |length| {
            let part: &str = parts.next()?;
            let hex = part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            (part.len() == length && hex).then_some(part)
        };
        let known = (|| Some((part(2)?, part(32)?, part(16)?, part(2)?)))();
        let (version, trace, span, flags) = known.ok_or(TraceParentError)?;
        let more = parts.next().is_some();
        let nothing = |id: &str| id.bytes().all(|byte| byte == b'0');
        if version == "ff" || (version == "00" && more) || nothing(trace) || nothing(span) {
            return Err(TraceParentError);
        }
        Ok(Self(format!("00-{trace}-{span}-{flags}").into()))
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn what_the_specification_has_is_read_and_nothing_else() {
        let given: TraceParent = GIVEN.parse().unwrap();
        assert_eq!((given.as_str(), given.trace_id()), (GIVEN, "4bf92f3577b34da6a3ce929d0e0e4736"));
        let later: TraceParent = GIVEN.replacen("00-", "cc-", 1).parse().unwrap();
        assert_eq!(later, given);
        let longer = format!("{}-what-will-be", GIVEN.replacen("00-", "cc-", 1));
        assert_eq!(longer.parse::<TraceParent>().unwrap(), given);
        let trace = given.trace_id();
        for wrong in [
            String::new(),
            "00".to_owned(),
            format!("{GIVEN}-more"),
            format!("{GIVEN}0"),
            GIVEN.replacen("00-", "ff-", 1),
            GIVEN.replace(trace, &"0".repeat(32)),
            GIVEN.replace("00f067aa0ba902b7", &"0".repeat(16)),
            GIVEN.replace(trace, &trace.to_uppercase()),
            GIVEN.replace(trace, &trace[1..]),
            format!("{GIVEN}\n"),
        ] {
            wrong.parse::<TraceParent>().unwrap_err();
        }
    }

    #[tokio::test]
    async fn a_trace_begins_anew_and_holds_what_is_done_in_it() {
        let [one, two] = [TraceParent::random(), TraceParent::random()];
        assert_ne!(one.trace_id(), two.trace_id());
        assert_eq!(one.as_str().parse::<TraceParent>().unwrap(), one);
        assert_eq!(TraceParent::current(), None);
        let within = one.clone().around(async { TraceParent::current() }).await;
        assert_eq!(within, Some(one));
    }
}
