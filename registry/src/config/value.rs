//! Values as people write them.

use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use bytesize::ByteSize;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error as _, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Mistakes;

/// A length of time, written `"90s"`, `"24h"`, `"7days"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(pub Duration);

/// A number of bytes, written `"10GiB"`, `"500MB"`, or as a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// A host and a port, written `"127.0.0.1:5000"`, `"[::]:5000"` or `"registry.local:5000"`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address(String);

/// Something is no address.
#[derive(Debug, thiserror::Error)]
#[error("not an address such as \"127.0.0.1:5000\"")]
pub struct AddressError;

impl Period {
    /// Notes a mistake under `key` when the time is not in `range`.
    pub fn check(self, range: RangeInclusive<Duration>, key: &str, mistakes: &mut Mistakes<'_>) {
        if !range.contains(&self.0) {
            let (least, most) = (Self(*range.start()), Self(*range.end()));
            let told = format!("{self} is out of range; write a time from {least} to {most}");
            mistakes.add(key, told);
        }
    }
}

impl Size {
    /// Notes a mistake under `key` when the size is not in `range`.
    pub fn check(self, range: RangeInclusive<u64>, key: &str, mistakes: &mut Mistakes<'_>) {
        if !range.contains(&self.0) {
            let (least, most) = (Self(*range.start()), Self(*range.end()));
            let told = format!("{self} is out of range; write a size from {least} to {most}");
            mistakes.add(key, told);
        }
    }
}

impl Address {
    pub(super) fn loopback(port: u16) -> Self {
        Self(format!("127.0.0.1:{port}"))
    }

    /// Reads `host:port`; the host is looked up only when it is used.
    fn parse(text: &str) -> Option<Self> {
        let named = || {
            let (host, port) = text.rsplit_once(':')?;
            let port: u16 = port.parse().ok()?;
            let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
            let host = Some(host).filter(|host| !host.is_empty() && host.bytes().all(good))?;
            Some(Self(format!("{host}:{port}")))
        };
        match text.parse::<SocketAddr>() {
            Ok(address) => Some(Self(address.to_string())),
            Err(_not_numeric) => named(),
        }
    }

    /// Returns the port.
    pub fn port(&self) -> Option<u16> {
        self.0.rsplit_once(':')?.1.parse().ok()
    }

    /// Whether only this machine can reach it.
    pub fn is_loopback(&self) -> bool {
        match self.0.parse::<SocketAddr>() {
            Ok(address) => address.ip().to_canonical().is_loopback(),
            Err(_a_name) => self.0.starts_with("localhost:"),
        }
    }

    /// Returns the address as `host:port`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        Self::parse(text).ok_or(AddressError)
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes) = self;
        // Only what reads back as the same number.
        for (unit, name) in [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        {
            if *bytes >= unit && bytes.is_multiple_of(unit) {
                return write!(f, "{}{name}", bytes / unit);
            }
        }
        write!(f, "{bytes}B")
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = deserializer.deserialize_str(Text("a time such as \"90s\" or \"24h\""))?;
        humantime::parse_duration(&text).map(Self).map_err(|_malformed| {
            D::Error::invalid_value(Unexpected::Str(&text), &"a time such as \"90s\" or \"24h\"")
        })
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = deserializer.deserialize_str(Text("an address such as \"127.0.0.1:5000\""))?;
        Self::parse(&text).ok_or_else(|| {
            let expected = &"an address such as \"127.0.0.1:5000\"";
            D::Error::invalid_value(Unexpected::Str(&text), expected)
        })
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"10GiB\", or a number of bytes")
            }

            fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Size, E> {
                let negative = |_| E::invalid_value(Unexpected::Signed(value), &self);
                u64::try_from(value).map(Size).map_err(negative)
            }

            fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Size, E> {
                Ok(Size(value))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                let wrong = |_| E::invalid_value(Unexpected::Str(text), &self);
                text.parse().map(|ByteSize(bytes)| Size(bytes)).map_err(wrong)
            }
        }
        deserializer.deserialize_any(Bytes)
    }
}

/// Takes a string and says what is expected when there is something else.
struct Text(&'static str);

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

impl JsonSchema for Period {
    fn schema_name() -> Cow<'static, str> {
        "Period".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "period", "examples": ["90s", "24h"] })
    }
}

impl JsonSchema for Size {
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["string", "integer"], "format": "size", "minimum": 0,
            "examples": ["10GiB", 1_048_576],
        })
    }
}

impl JsonSchema for Address {
    fn schema_name() -> Cow<'static, str> {
        "Address".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string", "format": "address", "pattern": "^.+:[0-9]+$",
            "examples": ["127.0.0.1:5000"],
        })
    }
}
