//! An NVIDIA library, which the node's driver provides, if any. It is opened on demand.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, c_void};
use std::mem::transmute_copy;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::ptr::NonNull;

/// Folders where the driver's libraries are mounted: by GKE's device plugin, which does not configure the loader, and by NVIDIA's container
/// toolkit in non-Debian and in Debian images. The toolkit updates the loader's cache if it can.
const PLACES: [&str; 3] = [
    "/usr/local/nvidia/lib64",
    "/usr/lib64",
    #[cfg(target_arch = "aarch64")]
    "/usr/lib/aarch64-linux-gnu",
    #[cfg(not(target_arch = "aarch64"))]
    "/usr/lib/x86_64-linux-gnu",
];

/// An open library. It is never closed, because drivers run threads of their own.
pub struct Library(NonNull<c_void>);

impl Library {
    /// Opens the library by its name through the loader, or from the folders in `PLACES`. Fails with the loader's message.
    pub fn open(name: &CStr) -> Result<Self, String> {
        Self::open_in(name, &PLACES.map(Path::new))
    }

    fn open_in(name: &CStr, places: &[&Path]) -> Result<Self, String> {
        let mut opened = Self::load(name);
        let file = OsStr::from_bytes(name.to_bytes());
        for path in places.iter().map(|place| place.join(file)) {
            if opened.is_ok() || !path.exists() {
                continue;
            }
            let path = CString::new(path.into_os_string().into_vec());
            opened = Self::load(&path.map_err(|e| e.to_string())?);
        }
        opened
    }

    fn load(name: &CStr) -> Result<Self, String> {
        // SAFETY: the name is a C string; the library's constructors are NVIDIA's, as in every program that uses a GPU.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(|| {
            // SAFETY: dlerror keeps one text per thread, until the next call there.
            let text = unsafe { libc::dlerror() };
            if text.is_null() {
                return "dlopen failed".to_owned();
            }
            // SAFETY: dlerror returned a C string.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        })
    }

    /// Looks up a function. Fails with its name if it is missing.
    ///
    /// # Safety
    /// `F` must be the type of the C function of that name.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, &'static str> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let symbol = CString::new(name).map_err(|_| name)?;
        // SAFETY: the handle is an open library's, the name a C string.
        let found = unsafe { libc::dlsym(self.0.as_ptr(), symbol.as_ptr()) };
        if found.is_null() {
            return Err(name);
        }
        // SAFETY: an address is as large as a function pointer, and the caller guarantees the type behind it.
        Ok(unsafe { transmute_copy(&found) })
    }
}

// SAFETY: a handle of an open library may be used on any thread.
unsafe impl Send for Library {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_library_is_found_where_the_loader_does_not_look() {
        let folder = tempfile::tempdir().unwrap();
        let name = c"libkvcachepool-made-up.so.1";
        let path = folder.path().join("libkvcachepool-made-up.so.1");
        let places = [Path::new("/nonexistent"), folder.path()];
        let absent = Library::open_in(name, &places).err().unwrap();
        assert!(
            absent.starts_with("libkvcachepool-made-up.so.1: "),
            "{absent}"
        );

        std::fs::write(&path, "no library").unwrap();
        let broken = Library::open_in(name, &places).err().unwrap();
        assert!(broken.starts_with(path.to_str().unwrap()), "{broken}");

        let source = folder.path().join("made_up.c");
        std::fs::write(&source, "int answer(void) { return 42; }").unwrap();
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&path, &source])
            .status();
        assert!(built.unwrap().success());
        assert!(Library::open_in(name, &places[..1]).is_err());
        let library = Library::open_in(name, &places).unwrap();
        // SAFETY: the function takes nothing and returns an int.
        let answer: unsafe extern "C" fn() -> i32 = unsafe { library.function("answer") }.unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { answer() }, 42);
    }
}
