//! [`ImageName`]: the name of an RBD image, as `pool[/namespace]/image[@snap]`.

use std::fmt;
use std::str::FromStr;

use crate::schema::rule::Rule;

/// Most bytes of one part of a name: Ceph keeps longer ones, but no name of an object.
const PART_BYTES: usize = 255;

/// The rule of the key `image`.
pub(crate) const IMAGE: Rule = Rule::Text {
    noun: "image",
    form: "pool[/namespace]/image[@snap], such as \"rbd/vol0\" or \"ssd/tenant1/vol0@monday\"",
    check: check_image,
};

/// The rule of the key `user`.
pub(crate) const CEPH_USER: Rule = Rule::Text {
    noun: "user",
    form: "the name of a Ceph user without its type, such as \"rblk\" for client.rblk",
    check: check_user,
};

/// The name of an RBD image, or of a snapshot of one.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ImageName {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; empty: the one without a name.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// The snapshot; none: the image as it is.
    pub snap: Option<String>,
}

impl FromStr for ImageName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (place, snap) = match text.split_once('@') {
            Some((place, snap)) => (place, Some(part("snapshot", snap)?)),
            None => (text, None),
        };
        let parts: Vec<&str> = place.split('/').collect();
        let (pool, namespace, image) = match parts[..] {
            [pool, image] => (pool, String::new(), image),
            [pool, namespace, image] => (pool, part("namespace", namespace)?, image),
            [_] => return Err("no pool".to_owned()),
            _ => return Err("more than pool, namespace and image".to_owned()),
        };
        Ok(Self { pool: part("pool", pool)?, namespace, image: part("image", image)?, snap })
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.pool)?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.image)?;
        self.snap.iter().try_for_each(|snap| write!(f, "@{snap}"))
    }
}

fn part(noun: &str, text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err(format!("the {noun} has no name"));
    }
    if text.len() > PART_BYTES {
        return Err(format!("the name of the {noun} is longer than {PART_BYTES} bytes"));
    }
    match text.chars().find(|c| c.is_control() || matches!(c, '/' | '@')) {
        Some(bad) => Err(format!("{bad:?} is not allowed in the name of the {noun}")),
        None => Ok(text.to_owned()),
    }
}

fn check_image(text: &str) -> Result<(), String> {
    text.parse::<ImageName>().map(drop)
}

fn check_user(text: &str) -> Result<(), String> {
    if let Some(name) = text.strip_prefix("client.") {
        return Err(format!("the type stands in front, write \"{name}\""));
    }
    part("user", text).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_are_parsed_and_printed() {
        for (text, pool, namespace, image, snap) in [
            ("rbd/vol0", "rbd", "", "vol0", None),
            ("rbd/vol0@monday", "rbd", "", "vol0", Some("monday")),
            ("ssd/tenant-1/a.b_c", "ssd", "tenant-1", "a.b_c", None),
            ("ssd/t/my disk@s", "ssd", "t", "my disk", Some("s")),
        ] {
            let name: ImageName = text.parse().unwrap();
            let parts = (&*name.pool, &*name.namespace, &*name.image, name.snap.as_deref());
            assert_eq!(parts, (pool, namespace, image, snap), "{text}");
            assert_eq!(name.to_string(), text);
        }
    }

    #[test]
    fn other_texts_are_no_names_of_images() {
        for (text, why) in [
            ("", "no pool"),
            ("vol0", "no pool"),
            ("rbd/", "the image has no name"),
            ("/vol0", "the pool has no name"),
            ("rbd//vol0", "the namespace has no name"),
            ("a/b/c/d", "more than pool, namespace and image"),
            ("rbd/vol0@", "the snapshot has no name"),
            ("rbd/vol0@a@b", "'@' is not allowed in the name of the snapshot"),
            ("rbd/vol0@a/b", "'/' is not allowed in the name of the snapshot"),
            ("rbd/vol\n0", "'\\n' is not allowed in the name of the image"),
        ] {
            assert_eq!(text.parse::<ImageName>().unwrap_err(), why, "{text:?}");
        }
        assert_eq!(check_user("rblk"), Ok(()));
        assert_eq!(
            check_user("client.rblk").unwrap_err(),
            "the type stands in front, write \"rblk\""
        );
    }
}
