//! The kernel proper out of a bzImage.
//!
//! A bzImage unpacks itself, which takes an emulated CPU seconds at every boot. The ELF file inside
//! is the same kernel, and QEMU boots it directly (Debian's kernels have CONFIG_PVH). Its place is
//! in the boot protocol's header (Documentation/arch/x86/boot.rst, `payload_offset`).

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Writes the ELF kernel inside the bzImage at `image` to `elf`.
pub(crate) fn unpack(image: &Path, elf: &Path) -> Result<()> {
    let bytes = fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let payload = payload(&bytes)
        .with_context(|| format!("{} has no payload where a bzImage has it", image.display()))?;
    let program = unpacker(payload)
        .with_context(|| format!("{} is compressed in an unknown way", image.display()))?;
    let packed = elf.with_extension("packed");
    fs::write(&packed, payload).with_context(|| format!("cannot write {}", packed.display()))?;
    let output = Command::new(program)
        .arg("-dc")
        .stdin(File::open(&packed)?)
        .stdout(File::create(elf).with_context(|| format!("cannot write {}", elf.display()))?)
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    fs::remove_file(&packed)?;
    // The unpackers may complain of what follows the stream, so the result decides.
    let mut magic = [0; 4];
    let read =
        File::open(elf).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
    if read.is_err() || magic != *b"\x7fELF" {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} cannot unpack {}: {}", image.display(), said.trim_end());
    }
    Ok(())
}

/// The compressed kernel inside a bzImage, without the four bytes of its unpacked size.
fn payload(image: &[u8]) -> Option<&[u8]> {
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let word = |at: usize| -> Option<usize> {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let setup = (usize::from(*image.get(0x1f1)?) + 1) * 512;
    let start = setup.checked_add(word(0x248)?)?;
    let end = start.checked_add(word(0x24c)?)?.checked_sub(4)?;
    image.get(start..end)
}

fn unpacker(payload: &[u8]) -> Option<&'static str> {
    let known: [(&[u8], &str); 3] =
        [(b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\0", "xz"), (b"\x1f\x8b", "gzip")];
    known.into_iter().find(|(magic, _)| payload.starts_with(magic)).map(|(_, program)| program)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 0x400];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16u32.to_le_bytes());
        image[0x24c..0x250]
            .copy_from_slice(&u32::try_from(payload.len() + 4).unwrap().to_le_bytes());
        image.extend_from_slice(&[0; 16]);
        image.extend_from_slice(payload);
        image.extend_from_slice(&[0; 4]);
        image
    }

    #[test]
    fn the_payload_is_found_by_the_header() {
        let image = bzimage(b"\x28\xb5\x2f\xfdabc");
        let found = payload(&image).unwrap();
        assert_eq!(found, b"\x28\xb5\x2f\xfdabc");
        assert_eq!(unpacker(found), Some("zstd"));
    }

    #[test]
    fn a_damaged_image_is_refused() {
        let image = bzimage(b"abcd");
        assert!(payload(&image[..image.len() - 6]).is_none());
        assert!(payload(&image[..0x200]).is_none());
        assert!(payload(&vec![0; 4096]).is_none());
        assert_eq!(unpacker(b"abcd"), None);
    }
}
