//! Which cgroups a dump says its threads were in (`cgroup.img`, `images/cgroup.proto`).

use std::collections::BTreeSet;
use std::io;

use prost::Message as _;

use super::{ImageError, ImageReader, Magic, write_magic, write_record};

/// The image's name.
pub const CGROUPS: &str = "cgroup.img";

/// As far as it is looked at here.
#[derive(Clone, PartialEq, prost::Message)]
struct Cgroups {
    #[prost(message, repeated, tag = "1")]
    sets: Vec<Set>,
    /// What the places are in.
    #[prost(message, repeated, tag = "2")]
    hierarchies: Vec<Hierarchy>,
}

/// The cgroups of one hierarchy.
#[derive(Clone, PartialEq, prost::Message)]
struct Hierarchy {
    /// Those that a restore makes, each a message.
    #[prost(bytes = "vec", repeated, tag = "2")]
    cgroups: Vec<Vec<u8>>,
}

/// Where a thread is in all hierarchies.
#[derive(Clone, PartialEq, prost::Message)]
struct Set {
    #[prost(uint32, tag = "1")]
    id: u32,
    /// Each a message.
    #[prost(bytes = "vec", repeated, tag = "2")]
    places: Vec<Vec<u8>>,
}

/// Returns a `cgroup.img` that names the same sets and no cgroup. A CRIU that is told nothing finds the
/// set of each thread in it, and leaves all of them where it is itself: in the new container's cgroup,
/// into which its runtime has put it.
pub fn naming_none(sets: &BTreeSet<u32>) -> io::Result<Vec<u8>> {
    let sets = sets.iter().map(|id| Set { id: *id, places: Vec::new() }).collect();
    let image = Cgroups { sets, hierarchies: Vec::new() };
    let mut file = Vec::new();
    write_magic(&mut file, Magic::CGROUPS)?;
    write_record(&mut file, &image.encode_to_vec())?;
    Ok(file)
}

/// Returns what restores where nobody tells CRIU anything, when this image does not: one of a CRIU that
/// was told to leave cgroups alone (`manage-cgroups=ignore`). It says in which ones the threads were, and
/// has none to make in any hierarchy, or no hierarchy: they cannot be moved there.
pub(crate) fn restorable(image: &[u8]) -> Result<Option<Vec<u8>>, ImageError> {
    let mut reader = ImageReader::new(image, Magic::CGROUPS)?;
    let Some(found) = reader.next_message::<Cgroups>()? else { return Ok(None) };
    let makes = found.hierarchies.iter().any(|hierarchy| !hierarchy.cgroups.is_empty());
    if makes || found.sets.iter().all(|set| set.places.is_empty()) {
        return Ok(None);
    }
    Ok(Some(naming_none(&found.sets.iter().map(|set| set.id).collect())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(sets: &[(u32, bool)], hierarchies: &[usize]) -> Vec<u8> {
        let sets = sets.iter().map(|(id, placed)| Set {
            id: *id,
            places: if *placed { vec![b"\x0a\x00\x12\x02/c".to_vec()] } else { Vec::new() },
        });
        let cgroup = || b"\x0a\x02/c".to_vec();
        let hierarchy = |count: &usize| Hierarchy { cgroups: vec![cgroup(); *count] };
        let hierarchies = hierarchies.iter().map(hierarchy).collect();
        let image = Cgroups { sets: sets.collect(), hierarchies };
        let mut file = Vec::new();
        write_magic(&mut file, Magic::CGROUPS).unwrap();
        write_record(&mut file, &image.encode_to_vec()).unwrap();
        file
    }

    #[test]
    fn cgroups_that_nobody_makes_are_not_named() {
        for hierarchies in [&[][..], &[0, 0]] {
            let found = restorable(&image(&[(3, true), (7, true)], hierarchies)).unwrap();
            assert_eq!(found, Some(image(&[(3, false), (7, false)], &[])));
        }
        for other in [image(&[(3, true)], &[0, 1]), image(&[(3, false)], &[]), image(&[], &[0])] {
            assert_eq!(restorable(&other).unwrap(), None, "it stays as it is");
        }
        assert_eq!(
            naming_none(&BTreeSet::new()).unwrap().len(),
            12,
            "two words and a record of nothing"
        );
        restorable(b"").unwrap_err();
        restorable(&image(&[], &[])[1..]).unwrap_err();
    }
}
