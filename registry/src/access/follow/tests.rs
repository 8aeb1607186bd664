use std::os::unix::fs::symlink;

use super::*;

fn number(path: &Path) -> Result<Followed<u32>, Vec<Mistake>> {
    let file = path.to_owned();
    Followed::open("number", [path.to_owned()], move |contents| {
        let text = String::from_utf8_lossy(&contents[0]);
        text.trim().parse().map_err(|_wrong| vec![mistake(&file, Some(1), "is no number")])
    })
}

#[test]
fn the_last_good_content_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("n");
    let told = number(&path).unwrap_err();
    assert!(told[0].to_string().contains("cannot be read"), "{told:?}");
    fs::write(&path, "x").unwrap();
    assert!(number(&path).unwrap_err()[0].to_string().ends_with("n:1:1: is no number"));
    fs::write(&path, "1").unwrap();
    let mut followed = number(&path).unwrap();
    let view = followed.view();
    let mut look = |expected: u32| {
        let (what, paths, parse) =
            (followed.what, Arc::clone(&followed.paths), Arc::clone(&followed.parse));
        let (current, seen) = (followed.current.clone(), followed.seen.clone());
        followed = Followed { what, paths, parse, current, seen }.look();
        assert_eq!(*view.get(), expected);
    };
    look(1);
    fs::write(&path, "2").unwrap();
    look(2);
    fs::write(&path, "two").unwrap();
    look(2);
    fs::remove_file(&path).unwrap();
    look(2);
    look(2);
    // Renamed over, as editors do.
    fs::write(directory.path().join("new"), "3").unwrap();
    fs::rename(directory.path().join("new"), &path).unwrap();
    look(3);
    // A link to a link that is swapped, as Kubernetes does.
    for (at, content) in [("v1", "4"), ("v2", "5")] {
        fs::create_dir(directory.path().join(at)).unwrap();
        fs::write(directory.path().join(at).join("n"), content).unwrap();
    }
    let data = directory.path().join("..data");
    fs::remove_file(&path).unwrap();
    symlink("v1", &data).unwrap();
    symlink("..data/n", &path).unwrap();
    look(4);
    symlink("v2", directory.path().join("next")).unwrap();
    fs::rename(directory.path().join("next"), &data).unwrap();
    look(5);
}
