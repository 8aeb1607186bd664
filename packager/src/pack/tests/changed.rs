//! A dump that somebody writes to while it is packed.

use super::*;

/// Looks at a dump, changes it, and returns what is said of that.
#[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
fn told(change: impl FnOnce(&Path)) -> Result<(), String> {
    let top = tempfile::tempdir().unwrap();
    let dump = dump(top.path(), &[(0x10_0000, noise(MIB, 1))]);
    let scratch = tempfile::tempdir().unwrap();
    let listing = Listing::of(&dump, scratch.path()).unwrap();
    let seen = Dump::scan(listing, SMALL_SHARD_BYTES).unwrap();
    change(&dump);
    seen.check_unchanged().map_err(|error| kybernate_spec::chain(&error).to_string())
}

#[test]
fn what_changes_meanwhile_is_named() {
    assert_eq!(told(|_| ()), Ok(()));
    // What CRIU leaves beside its images is no part of the dump.
    assert_eq!(told(|dump| fs::write(dump.join("dump.log"), "x").unwrap()), Ok(()));
    let named = |name: &str, change: &dyn Fn(&Path)| {
        let told = told(|dump| change(&dump.join(name))).unwrap_err();
        assert!(told.contains(name) && told.contains("meanwhile"), "{told}");
    };
    named("pages-1.img", &|file| {
        fs::OpenOptions::new().append(true).open(file).unwrap().write_all(b"x").unwrap();
    });
    named("pstree.img", &|file| fs::remove_file(file).unwrap());
    named("core-2.img", &|file| fs::write(file, "").unwrap());
    // Another file of the same length in its place.
    named("pstree.img", &|file| {
        let content = fs::read(file).unwrap();
        fs::rename(file, file.with_file_name("dump.log")).unwrap();
        fs::write(file, content).unwrap();
    });
    assert!(told(|dump| fs::remove_dir_all(dump).unwrap()).is_err());
}
