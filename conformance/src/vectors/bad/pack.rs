//! The pack of images.

use kybernate_spec::Reason;

use super::super::artifact::{Artifact, Pool, file, pack};

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    header(pool)?;
    ends(pool)?;
    names(pool)?;
    order(pool)
}

/// Replaces the pack and adds the vector.
fn bad(
    pool: &mut Pool,
    name: &'static str,
    reason: Reason,
    what: &'static str,
    content: Vec<u8>,
) -> anyhow::Result<()> {
    let mut artifact = Artifact::small();
    artifact.pack = Some(content);
    pool.bad(name, "4", reason, what, artifact)
}

fn good() -> Vec<u8> {
    pack(&Artifact::small().files)
}

fn patched(at: usize, with: &[u8]) -> Vec<u8> {
    let mut content = good();
    content.splice(at..at + with.len(), with.iter().copied());
    content
}

fn header(pool: &mut Pool) -> anyhow::Result<()> {
    bad(pool, "pack-magic", Reason::Header, "another magic", patched(7, b"s"))?;
    bad(pool, "pack-version-0", Reason::Unsupported, "version 0", patched(8, &[0, 0]))?;
    bad(pool, "pack-version-2", Reason::Unsupported, "version 2", patched(8, &[2, 0]))?;
    bad(pool, "pack-version-257", Reason::Unsupported, "version 257", patched(8, &[1, 1]))?;
    bad(pool, "pack-zero", Reason::Header, "a number that must be zero is not", patched(10, &[1]))?;
    let many = patched(12, &((1_u32 << 20) + 1).to_le_bytes());
    bad(pool, "pack-too-many", Reason::Header, "1,048,577 files announced", many)
}

fn ends(pool: &mut Pool) -> anyhow::Result<()> {
    let cut = |length: usize| good().get(..length).unwrap_or_default().to_vec();
    for (name, what, length) in [
        ("pack-no-bytes", "a pack of no bytes", 0),
        ("pack-cut-header", "an end in the header", 15),
        ("pack-cut-before-file", "an end before the first file", 16),
        ("pack-cut-lengths", "an end in a file's lengths", 25),
        ("pack-cut-name", "an end in a file's name", 30),
        ("pack-cut-content", "an end in a file's content", 38),
        ("pack-cut-between", "an end between two files", 40),
    ] {
        bad(pool, name, Reason::Truncated, what, cut(length))?;
    }
    let more = patched(12, &3_u32.to_le_bytes());
    bad(pool, "pack-files-missing", Reason::Truncated, "a file fewer than announced", more)?;
    let fewer = patched(12, &1_u32.to_le_bytes());
    bad(pool, "pack-files-over", Reason::Trailing, "a file more than announced", fewer)?;
    let trailing = [&*good(), &[0]].concat();
    bad(pool, "pack-trailing", Reason::Trailing, "a byte behind the last file", trailing)
}

fn names(pool: &mut Pool) -> anyhow::Result<()> {
    let cases: [(&str, &str, &[u8]); 24] = [
        ("name-above", "a name that goes up", b"../core-1.img"),
        ("name-absolute", "an absolute path", b"/core-1.img"),
        ("name-below", "a name with a directory", b"a/core-1.img"),
        ("name-slash", "a name that ends with a slash", b"core-1.img/"),
        ("name-backslash", "a name with a backslash", b"..\\core-1.img"),
        ("name-dot", "the directory itself", b"."),
        ("name-dots", "the directory above", b".."),
        ("name-empty", "no name", b""),
        ("name-nul", "a name with a NUL", b"core-1.img\0"),
        ("name-no-utf8", "a name that is no UTF-8", b"core-\xff.img"),
        ("name-parent", "CRIU's link to another dump", b"parent"),
        ("name-criu-conf", "CRIU's configuration", b"criu.conf"),
        ("name-config-json", "the runtime's configuration", b"config.json"),
        ("name-dump-log", "a log", b"dump.log"),
        ("name-stats", "statistics", b"stats-dump"),
        ("name-script", "a script", b"action-script.sh"),
        ("name-pages", "pages, which belong into shards", b"pages-1.img"),
        ("name-unknown", "an image that CRIU does not know", b"secrets-1.img"),
        ("name-no-number", "a name without its number", b"core-.img"),
        ("name-no-hex", "a number that is none", b"core-1g.img"),
        ("name-long-number", "a number of 21 digits", b"core-012345678901234567890.img"),
        ("name-uppercase", "a name in uppercase", b"CORE-1.img"),
        ("name-suffix", "a name behind whose suffix something follows", b"core-1.img.img"),
        ("name-no-suffix", "a name without its suffix", b"core-1"),
    ];
    for (name, what, bytes) in cases {
        bad(pool, name, Reason::FileName, what, pack(&[file(bytes, "content")]))?;
    }
    for (name, what, text) in [
        (
            "name-amdgpu-long",
            "65 bytes where 64 are allowed",
            format!("amdgpu-{}.img", "a".repeat(65)),
        ),
        ("name-amdgpu-dot", "a dot in amdgpu's name", "amdgpu-a.b.img".to_owned()),
        ("name-65535", "a name of 65,535 bytes", "a".repeat(65_535)),
    ] {
        bad(pool, name, Reason::FileName, what, pack(&[file(text, "content")]))?;
    }
    Ok(())
}

fn order(pool: &mut Pool) -> anyhow::Result<()> {
    let twice = pack(&[file("core-1.img", "a"), file("core-1.img", "b")]);
    bad(pool, "pack-name-twice", Reason::FileOrder, "a name twice", twice)?;
    let descending = pack(&[file("mm-1.img", "a"), file("core-1.img", "b")]);
    bad(pool, "pack-descending", Reason::FileOrder, "names in descending order", descending)?;
    let numbers = pack(&[file("core-9.img", "a"), file("core-10.img", "b")]);
    bad(
        pool,
        "pack-numbers",
        Reason::FileOrder,
        "names in the order of their numbers, not of their bytes",
        numbers,
    )?;
    let large = pack(&[file("core-1.img", vec![0; (1 << 20) + 1])]);
    bad(pool, "pack-file-large", Reason::FileSize, "a file of 1 MiB and a byte", large)?;
    for (name, what, size) in [
        ("pack-file-huge", "a file that says to have 16 EiB", u64::MAX),
        ("pack-file-2-63", "a file that says to have 8 EiB", 1 << 63),
    ] {
        bad(pool, name, Reason::FileSize, what, patched(18, &size.to_le_bytes()))?;
    }
    Ok(())
}
