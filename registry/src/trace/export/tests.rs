use std::path::Path;

use opentelemetry::trace::{Span as _, SpanKind, Tracer as _, TracerProvider as _};
use opentelemetry_sdk::trace::SdkTracerProvider;

use super::*;

fn settings(headers: &Path) -> Trace {
    Trace { headers: Some(headers.to_owned()), ..Trace::default() }
}

#[test]
fn headers_are_read_and_what_is_wrong_is_told_without_them() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "authorization: Bearer geheim\n\nX-Scope: a:b\n").unwrap();
    let read = headers(&settings(file.path())).unwrap();
    assert_eq!(read["authorization"], "Bearer geheim");
    assert_eq!(read["x-scope"], "a:b");
    assert!(!format!("{read:?}").contains("geheim"));
    for wrong in ["a: b\ngeheim", "geh eim: x", "a: ge\u{1}heim"] {
        fs::write(file.path(), wrong).unwrap();
        let told = headers(&settings(file.path())).unwrap_err().to_string();
        assert!(told.contains("is no header") && !told.contains("heim"), "{told}");
    }
    let told = headers(&settings(Path::new("/no/such/file"))).unwrap_err().to_string();
    assert!(told.contains("/no/such/file"), "{told}");
}

#[test]
fn a_collector_is_named_with_or_without_the_path() {
    for endpoint in ["http://h:4318", "http://h:4318/", "http://h:4318/v1/traces"] {
        assert_eq!(with_path(endpoint), "http://h:4318/v1/traces");
    }
    assert_eq!(with_path("https://h/otlp"), "https://h/otlp/v1/traces");
}

#[test]
fn spans_that_find_no_room_are_counted_and_nobody_waits() {
    let (outlet, waiting) = Outlet::new();
    let provider = SdkTracerProvider::builder().with_span_processor(outlet).build();
    let tracer = provider.tracer("t");
    for _ in 0..WAITING_MAX + 10 {
        tracer.span_builder("s").with_kind(SpanKind::Internal).start(&tracer).end();
    }
    assert_eq!(waiting.spans.len(), WAITING_MAX);
    assert_eq!(waiting.displaced.load(Ordering::Relaxed), 10);
}

#[tokio::test(start_paused = true)]
async fn lost_spans_are_told_once_a_minute() {
    let mut complaint = Complaint::default();
    complaint.about(3, "away");
    assert_eq!(complaint.lost, 0, "the first is told at once");
    complaint.about(4, "away");
    assert_eq!(complaint.lost, 4, "the next is not");
    tokio::time::advance(WARN_EVERY).await;
    complaint.about(5, "away");
    assert_eq!(complaint.lost, 0);
}
