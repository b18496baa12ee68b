//! [`rblk_options`]: the options of a program in C: the volume, and the way to open it.

use std::ffi::{CStr, c_char};
use std::path::Path;

use rblk_client::{Config, Options};

use crate::failure::CallFailure;

/// Fences the host that holds the volume: `RBLK_TAKE_OVER`.
const TAKE_OVER: u32 = 1;
/// More bytes than any version has: `size` was not set.
const SIZE_MAX: usize = 4096;

/// The options for opening a volume: `struct rblk_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct rblk_options {
    /// Bytes of the structure that the program knows.
    pub(crate) size: usize,
    /// Address and volume.
    pub(crate) uri: *const c_char,
    /// A file as in `mounts.d`.
    pub(crate) config: *const c_char,
    /// Lines of a configuration file.
    pub(crate) settings: *const c_char,
    /// 16 bytes.
    pub(crate) host_id: *const u8,
    /// Limit of the data of one request.
    pub(crate) max_io: u64,
    /// Flags.
    pub(crate) flags: u32,
    /// Queues.
    pub(crate) queues: u16,
    /// The depth of each queue.
    pub(crate) queue_depth: u16,
    /// Buffers of each queue beyond its depth.
    pub(crate) spare_buffers: u16,
    /// Zero.
    pub(crate) reserved: [u16; 3],
}

const NOTHING: rblk_options = rblk_options {
    size: 0,
    uri: std::ptr::null(),
    config: std::ptr::null(),
    settings: std::ptr::null(),
    host_id: std::ptr::null(),
    max_io: 0,
    flags: 0,
    queues: 0,
    queue_depth: 0,
    spare_buffers: 0,
    reserved: [0; 3],
};

/// Reads the options of a program.
///
/// # Safety
/// `place` is null, or as the header says of `struct rblk_options`.
pub(crate) unsafe fn read(place: *const rblk_options) -> Result<Options, CallFailure> {
    // SAFETY: as the caller says.
    let given = unsafe { copy(place) }?;
    if given.flags & !TAKE_OVER != 0 || given.reserved != [0; 3] {
        let words = "an option that this version of the library does not know";
        return Err(CallFailure::new(libc::ENOTSUP, words));
    }
    // SAFETY: the strings of the structure are null or end with a zero, as the caller says.
    let (uri, file, settings) =
        unsafe { (text(given.uri)?, text(given.config)?, text(given.settings)?) };
    let mut options = Options::new(config(&given, uri, file, settings)?);
    options = options.spare_buffers(given.spare_buffers);
    if !given.host_id.is_null() {
        // SAFETY: 16 bytes, as the caller says.
        let id = unsafe { given.host_id.cast::<[u8; 16]>().read() };
        options = options.host_id(id);
    }
    if given.flags & TAKE_OVER != 0 {
        options = options.take_over();
    }
    Ok(options)
}

/// The structure, with zeros after the end of the program's.
unsafe fn copy(place: *const rblk_options) -> Result<rblk_options, CallFailure> {
    if place.is_null() || !place.is_aligned() {
        return Err(CallFailure::misuse("a null pointer where options are needed"));
    }
    // SAFETY: it begins with its size.
    let size = unsafe { place.cast::<usize>().read() };
    if size < size_of::<usize>() {
        let words = "the field `size` of rblk_options is not set: begin with RBLK_OPTIONS_INIT";
        return Err(CallFailure::misuse(words));
    }
    if size > SIZE_MAX {
        let words = "the field `size` of rblk_options is no size: begin with RBLK_OPTIONS_INIT";
        return Err(CallFailure::misuse(words));
    }
    let mut given = NOTHING;
    let len = size.min(size_of::<rblk_options>());
    // SAFETY: `place` is valid for `size` bytes, and `given` has `len`. Any bytes are a valid one.
    unsafe { (&raw mut given).cast::<u8>().copy_from_nonoverlapping(place.cast(), len) };
    // Options of a newer program beyond that must not be ignored in silence.
    for at in len..size {
        // SAFETY: inside of `size` bytes.
        if unsafe { place.cast::<u8>().add(at).read() } != 0 {
            let words = "the program uses options that this version of the library does not know";
            return Err(CallFailure::new(libc::ENOTSUP, words));
        }
    }
    Ok(given)
}

unsafe fn text<'a>(place: *const c_char) -> Result<Option<&'a str>, CallFailure> {
    if place.is_null() {
        return Ok(None);
    }
    // SAFETY: it ends with a zero, as the caller says.
    let text = unsafe { CStr::from_ptr(place) }.to_str();
    text.map(Some).map_err(|_| CallFailure::misuse("a text of the options is not UTF-8"))
}

/// The configuration: the file, overridden by the settings, overridden by the fields.
fn config(
    given: &rblk_options,
    uri: Option<&str>,
    file: Option<&str>,
    settings: Option<&str>,
) -> Result<Config, CallFailure> {
    let invalid = |error: &dyn std::fmt::Display| CallFailure::of(libc::EINVAL, error);
    // A file alone is loaded directly, so that an error names its line.
    if let (Some(file), None, None) = (file, uri, settings) {
        let config = Config::load(Path::new(file)).map_err(|error| invalid(&error))?;
        return with_fields(config, given);
    }
    let mut table = match file {
        None => toml::Table::new(),
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .map_err(|error| invalid(&format_args!("cannot read {file}: {error}")))?;
            parse(&text, file)?
        }
    };
    table.extend(parse(settings.unwrap_or_default(), "the settings")?);
    if let Some(uri) = uri {
        let (target, volume) = split(uri)?;
        table.insert("target".to_owned(), vec![target].into());
        table.insert("volume".to_owned(), volume.into());
    }
    let text = toml::to_string(&table).map_err(|error| invalid(&error))?;
    let config =
        Config::parse(&text, file.unwrap_or("options")).map_err(|error| invalid(&error))?;
    with_fields(config, given)
}

fn with_fields(mut config: Config, given: &rblk_options) -> Result<Config, CallFailure> {
    if given.queues != 0 {
        config.queues = Some(given.queues);
    }
    if given.queue_depth != 0 {
        config.queue_depth = given.queue_depth;
    }
    if given.max_io != 0 {
        config.max_io.0 = given.max_io;
    }
    // The default of `Options::open`: other limits depend on it.
    config.queues.get_or_insert(1);
    config.validate().map_err(|error| CallFailure::of(libc::EINVAL, &error))?;
    Ok(config)
}

fn parse(text: &str, name: &str) -> Result<toml::Table, CallFailure> {
    text.parse::<toml::Table>()
        .map_err(|error| CallFailure::of(libc::EINVAL, &format_args!("{name}: {error}")))
}

/// Address and volume of `tcp://HOST:PORT/VOLUME`.
fn split(uri: &str) -> Result<(&str, &str), CallFailure> {
    let parts = uri.rsplit_once('/').filter(|(target, volume)| {
        let host = target.split_once("://").map(|(_, host)| host);
        host.is_some_and(|host| !host.is_empty()) && !volume.is_empty()
    });
    parts.ok_or_else(|| {
        let words = "is no address of a volume: rdma://HOST/VOLUME, or tcp://HOST:PORT/VOLUME";
        CallFailure::of(libc::EINVAL, &format_args!("{uri:?} {words}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said<T: std::fmt::Debug>(result: Result<T, CallFailure>) -> (i32, String) {
        let errno = result.unwrap_err().tell();
        // SAFETY: the text of this thread.
        let text = unsafe { CStr::from_ptr(crate::failure::rblk_error()) };
        (errno, text.to_str().unwrap().to_owned())
    }

    #[test]
    fn a_uri_has_an_address_and_a_volume() {
        assert_eq!(split("tcp://127.0.0.1:7/v").unwrap(), ("tcp://127.0.0.1:7", "v"));
        assert_eq!(split("rdma://[fe80::1]/a.b").unwrap(), ("rdma://[fe80::1]", "a.b"));
        for wrong in ["", "v", "tcp://h", "tcp://h/", "tcp:///v", "/h/v"] {
            let (errno, text) = said(split(wrong));
            assert!(errno == -libc::EINVAL && text.contains("rdma://HOST/VOLUME"), "{text}");
        }
    }

    #[test]
    fn fields_override_settings_and_settings_override_the_file() {
        let dir = std::env::temp_dir().join(format!("rblk-capi-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("m.toml");
        let text = "target = ['tcp://a']\nvolume = 'v'\nqueue_depth = 3\nread_only = true\n";
        std::fs::write(&file, text).unwrap();
        let file = file.to_str().unwrap();
        let alone = config(&NOTHING, None, Some(file), None).unwrap();
        assert_eq!((alone.queue_depth, alone.read_only, alone.queues), (3, true, Some(1)));
        let given = rblk_options { queues: 2, max_io: 8192, ..NOTHING };
        let settings = "queue_depth = 4\nmax_io = '64KiB'";
        let all = config(&given, Some("tcp://b/w"), Some(file), Some(settings)).unwrap();
        assert_eq!((all.target, all.volume), (vec!["tcp://b".to_owned()], "w".to_owned()));
        assert_eq!((all.queue_depth, all.max_io.0, all.queues), (4, 8192, Some(2)));
        assert!(all.read_only);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn invalid_options_are_named() {
        let wrong = |uri, file, settings| said(config(&NOTHING, uri, file, settings)).1;
        assert!(wrong(None, None, None).contains("target"));
        let odd = rblk_options { max_io: 5000, ..NOTHING };
        let (errno, text) = said(config(&odd, Some("tcp://h/v"), None, None));
        assert!(errno == -libc::EINVAL && text.contains("max_io"), "{text}");
        assert!(wrong(Some("tcp://h/v"), None, Some("depth = 3")).contains("depth"));
        assert!(wrong(Some("tcp://h/v"), None, Some("= 3")).contains("the settings"));
        assert!(wrong(Some("tcp://h/v"), Some("/none"), None).contains("cannot read /none"));
    }

    #[test]
    fn a_structure_of_another_version_is_understood_or_refused() {
        // SAFETY: null, and then structures of as many bytes as they say.
        unsafe {
            assert_eq!(said(copy(std::ptr::null())).0, -libc::EINVAL);
            assert_eq!(said(copy(&NOTHING)).0, -libc::EINVAL, "no size");
            let old = rblk_options { size: 16, uri: c"u".as_ptr(), max_io: 9, ..NOTHING };
            let read = copy(&raw const old).unwrap();
            assert!(read.uri == old.uri && read.max_io == 0, "what it does not have is zero");

            let mut newer = [0usize; size_of::<rblk_options>() / size_of::<usize>() + 1];
            newer[0] = size_of_val(&newer);
            assert!(copy(newer.as_ptr().cast()).is_ok());
            *newer.last_mut().unwrap() = 1;
            assert_eq!(said(copy(newer.as_ptr().cast())).0, -libc::ENOTSUP);
        }
    }

    #[test]
    fn unknown_flags_are_refused() {
        let given = rblk_options { size: size_of::<rblk_options>(), flags: 2, ..NOTHING };
        // SAFETY: a whole structure without texts.
        assert_eq!(said(unsafe { read(&raw const given) }).0, -libc::ENOTSUP);
    }
}
