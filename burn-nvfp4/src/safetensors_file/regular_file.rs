//! Opening files that somebody else names: regular files and links to them, nothing else.
use super::SafetensorsError;
use std::{
    fs::{File, FileType, Metadata},
    io::Read,
    path::Path,
};

/// Opens a regular file, or a link to one, and gives its size in bytes.
///
/// # Errors
/// When it is absent, or a folder, pipe, socket or device (which could block or never end).
pub fn open(path: &Path) -> Result<(File, u64), SafetensorsError> {
    let io = |source| SafetensorsError::io(path, source);
    // Looked at before it is opened, because opening a pipe waits for a writer; and after, because that is the file read.
    require_regular(path, &std::fs::metadata(path).map_err(io)?)?;
    let file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    require_regular(path, &metadata)?;
    Ok((file, metadata.len()))
}

/// Reads a whole regular file of at most `limit` bytes.
///
/// # Errors
/// As [`open`], and when the file is larger.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, SafetensorsError> {
    let (file, len) = open(path)?;
    let too_large = |len: u64| {
        SafetensorsError::file(
            path,
            format!("{len} bytes, more than the {limit} that are accepted here"),
        )
    };
    if len > limit {
        return Err(too_large(len));
    }
    // It may grow while it is read.
    let mut bytes = Vec::with_capacity(len as usize);
    let read = file.take(limit + 1).read_to_end(&mut bytes);
    let read = read.map_err(|source| SafetensorsError::io(path, source))?;
    match read as u64 > limit {
        true => Err(too_large(read as u64)),
        false => Ok(bytes),
    }
}

/// Reads a whole regular UTF-8 file of at most `limit` bytes.
///
/// # Errors
/// As [`read`], and when the bytes are not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> Result<String, SafetensorsError> {
    String::from_utf8(read(path, limit)?).map_err(|error| SafetensorsError::file(path, error.utf8_error().to_string()))
}

fn require_regular(path: &Path, metadata: &Metadata) -> Result<(), SafetensorsError> {
    match metadata.is_file() {
        true => Ok(()),
        false => {
            let kind = kind(metadata.file_type());
            Err(SafetensorsError::file(path, format!("is a {kind}, expected a file")))
        }
    }
}

fn kind(file_type: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if file_type.is_fifo() {
            return "pipe";
        }
        if file_type.is_socket() {
            return "socket";
        }
        if file_type.is_char_device() || file_type.is_block_device() {
            return "device";
        }
    }
    match file_type.is_dir() {
        true => "folder",
        false => "special file",
    }
}
