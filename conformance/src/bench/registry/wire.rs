//! A client that costs little, so that what is measured is the server.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

/// A reply's head is shorter than this.
const HEAD_BYTES: usize = 16 << 10;
/// Bytes per read of a body.
const READ_BYTES: usize = 256 << 10;
/// More header fields than any of these servers sends.
const FIELDS: usize = 64;
/// A server that says nothing for so long does not work.
const SILENCE: Duration = Duration::from_mins(1);

/// A connection that is kept open.
#[derive(Debug)]
pub(super) struct Wire {
    stream: TcpStream,
    host: String,
    buffer: Vec<u8>,
}

/// The head of a reply whose body was read.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    /// `Content-Length`.
    pub(super) length: u64,
    /// `Location`, without scheme and host.
    pub(super) location: Option<String>,
}

impl Wire {
    pub(super) fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        Ok(Self { stream, host: address.to_string(), buffer: vec![0; READ_BYTES] })
    }

    /// Asks for something and throws the body of the reply away.
    pub(super) fn ask(&mut self, method: &str, target: &str) -> anyhow::Result<Reply> {
        // Without it docker-registry looks for a manifest of its first schema.
        self.send(
            method,
            target,
            "Accept: application/vnd.oci.image.manifest.v1+json, */*\r\n",
            &[],
        )
    }

    /// Sends a request with a body in pieces; `fields` are header lines with their ends.
    pub(super) fn send(
        &mut self,
        method: &str,
        target: &str,
        fields: &str,
        body: &[&[u8]],
    ) -> anyhow::Result<Reply> {
        let length: usize = body.iter().map(|piece| piece.len()).sum();
        let has_body = matches!(method, "PUT" | "POST" | "PATCH");
        let framing =
            if has_body { format!("Content-Length: {length}\r\n") } else { String::new() };
        let host = &self.host;
        let head = format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n{fields}{framing}\r\n");
        if length < HEAD_BYTES {
            let whole: Vec<&[u8]> = std::iter::once(head.as_bytes()).chain(body.to_vec()).collect();
            self.stream.write_all(&whole.concat())?;
        } else {
            self.stream.write_all(head.as_bytes())?;
            body.iter().try_for_each(|piece| self.stream.write_all(piece))?;
        }
        self.read(method == "HEAD").with_context(|| format!("{method} {target}"))
    }

    fn read(&mut self, bodiless: bool) -> anyhow::Result<Reply> {
        let mut filled = 0;
        let (mut reply, head) = loop {
            let space = self.buffer.get_mut(filled..).context("a head without end")?;
            filled += positive(self.stream.read(space)?)?;
            if let Some(parsed) = parse(self.buffer.get(..filled).unwrap_or_default())? {
                break parsed;
            }
        };
        if bodiless || matches!(reply.status, 204 | 304) {
            reply.length = 0;
        }
        let early = u64::try_from(filled - head)?;
        ensure!(early <= reply.length, "bytes after the reply's end");
        let mut missing = reply.length - early;
        while missing > 0 {
            let most = usize::try_from(missing).unwrap_or(READ_BYTES).min(READ_BYTES);
            let space = self.buffer.get_mut(..most).unwrap_or_default();
            missing -= u64::try_from(positive(self.stream.read(space)?)?)?;
        }
        Ok(reply)
    }
}

fn positive(read: usize) -> io::Result<usize> {
    if read == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(read) }
}

/// Reads a head. Returns it with its length when it is whole.
fn parse(bytes: &[u8]) -> anyhow::Result<Option<(Reply, usize)>> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS];
    let mut head = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(end) = head.parse(bytes)? else { return Ok(None) };
    let mut reply = Reply { status: head.code.unwrap_or_default(), length: 0, location: None };
    for field in head.headers {
        let value = std::str::from_utf8(field.value)?;
        match field.name.to_ascii_lowercase().as_str() {
            "content-length" => reply.length = value.parse()?,
            "location" => reply.location = Some(path_of(value).to_owned()),
            "transfer-encoding" => bail!("a reply of unknown length"),
            _ => {}
        }
    }
    Ok(Some((reply, end)))
}

fn path_of(location: &str) -> &str {
    let Some((_scheme, rest)) = location.split_once("://") else { return location };
    rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/")
}

#[cfg(test)]
mod tests {
    use super::{parse, path_of};

    #[test]
    fn a_head_is_read_when_it_is_whole() {
        let text = b"HTTP/1.1 202 Accepted\r\nLOCATION: http://h:1/v2/a?x=y\r\n\r\n";
        let (cut, _) = text.split_at(30);
        assert!(parse(cut).unwrap().is_none());
        let (reply, end) = parse(text).unwrap().unwrap();
        assert_eq!((reply.status, reply.length, end), (202, 0, text.len()));
        assert_eq!(reply.location.as_deref(), Some("/v2/a?x=y"));
    }

    #[test]
    fn a_location_may_be_a_path() {
        assert_eq!(path_of("/v2/a"), "/v2/a");
        assert_eq!(path_of("http://h"), "/");
    }
}
