//! The names in a certificate whose chain has been proven.

use der::{Decode as _, Tag, Tagged as _};
use rustls_pki_types::CertificateDer;
use x509_cert::Certificate;
use x509_cert::ext::pkix::SubjectAltName;
use x509_cert::ext::pkix::name::GeneralName;

/// Common name (X.520, RFC 4519).
const COMMON_NAME: der::asn1::ObjectIdentifier = der::asn1::ObjectIdentifier::new_unwrap("2.5.4.3");

/// Returns the subject's common names, and alternative names that are URIs or DNS names. What cannot
/// be read names nobody.
pub(crate) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = Certificate::from_der(certificate) else { return Vec::new() };
    let certificate = certificate.tbs_certificate;
    let attributes = certificate.subject.0.iter().flat_map(|part| part.0.iter());
    let common = attributes.filter(|attribute| attribute.oid == COMMON_NAME).filter_map(|named| {
        let readable = [Tag::Utf8String, Tag::PrintableString, Tag::Ia5String];
        let text = readable.contains(&named.value.tag()).then(|| named.value.value())?;
        String::from_utf8(text.to_vec()).ok()
    });
    let alternative = certificate.get::<SubjectAltName>().ok().flatten();
    let alternative = alternative.into_iter().flat_map(|(_critical, names)| names.0);
    let alternative = alternative.filter_map(|name| match name {
        GeneralName::UniformResourceIdentifier(name) | GeneralName::DnsName(name) => {
            Some(name.to_string())
        }
        _ => None,
    });
    // A name with line ends could write lines of its own into a log.
    let plain = |name: &String| !name.is_empty() && !name.chars().any(char::is_control);
    common.chain(alternative).filter(plain).collect()
}
