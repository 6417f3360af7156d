"""Pictures from everything a notebook holds; what is damaged, absurd or hostile is refused by name."""

import base64
import io
import struct
import zlib

import numpy as np
import PIL.Image
import pytest

from exl2nb.core.errors import MissingDependency, PictureError
from exl2nb.model.vision import pictures
from exl2nb.model.vision.pictures import Picture


def png(picture, kind="PNG", **more):
    held = io.BytesIO()
    picture.save(held, kind, **more)
    return held.getvalue()


@pytest.fixture
def drawn():
    return PIL.Image.fromarray(np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3))


def test_every_source_gives_the_same_pixels(drawn, tmp_path):
    (tmp_path / "a.png").write_bytes(png(drawn))
    array = np.asarray(drawn)
    url = "data:image/png;base64," + base64.b64encode(png(drawn)).decode()
    sources = [
        drawn,
        png(drawn),
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        url,
        array,
        array.astype(int),
        png(drawn, "WEBP", lossless=True),
    ]
    found = [Picture.of(source) for source in sources]
    assert {one.digest for one in found} == {found[0].digest}
    assert found[0].size == (8, 6)
    assert not found[0].is_video
    assert repr(found[0]) == "Picture(8x6)"
    assert Picture.of(found[0]) is found[0]
    assert Picture.of(array / 255).digest == found[0].digest
    assert Picture.of(drawn.resize((9, 6))).digest != found[0].digest


def test_arrays_of_one_channel_tensors_and_figures():
    import torch

    grey = np.full((4, 5), 200, np.uint8)
    assert np.asarray(Picture.of(grey).frames[0])[0, 0].tolist() == [200] * 3
    assert Picture.of(torch.from_numpy(grey)).digest == Picture.of(grey[:, :, None]).digest == Picture.of(grey).digest
    assert np.asarray(Picture.of(grey > 100).frames[0]).min() == 255

    class Figure:
        def savefig(self, held, format, facecolor):
            held.write(png(PIL.Image.new("RGB", (3, 2), facecolor)))

    assert Picture.of(Figure()).size == (3, 2)


def test_transparency_is_white_and_the_camera_s_rotation_is_done(drawn):
    clear = PIL.Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert np.asarray(Picture.of(clear).frames[0]).min() == 255
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    assert Picture.of(png(drawn, "JPEG", exif=exif)).size == (6, 8)
    deep = PIL.Image.fromarray(np.full((2, 2), 0x8000, np.uint16))
    assert np.asarray(Picture.of(deep).frames[0])[0, 0, 0] == 0x80


def header(width, height):
    """A PNG of so many pixels and no data."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT" + b"\0" * 8


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (header(60000, 60000), "million pixels"),
        (header(20000, 3), "sides of at most 16384"),
        (header(16000, 16000), "than 67 million"),
        (header(9000, 9000), "at most 67 million"),
        (header(4000, 3), "200 times"),
        (header(40, 30), "damaged"),
        (b"no picture at all", "no picture is in these"),
        (b"", "no picture"),
        ("https://example.org/a.png", "nothing is fetched"),
        ("/no/such/file.png", "no file"),
        ("data:image/png;base64,@@@", "not base64"),
        ("data:image/png,abc", "expected base64"),
        ("data:nothing", "no data URL"),
        (7, "is a int"),
        ({}, "is a mapping"),
        (np.zeros((2, 2, 5)), "an array"),
        (np.zeros((0, 3, 3)), "an array"),
        (np.full((2, 2), 300), "0 to 255"),
        (np.full((2, 2), 2.5), "0 to 1"),
        (np.full((2, 2), np.nan), "0 to 1"),
        (np.zeros((20000, 2), np.uint8), "sides of at most"),
        (PIL.Image.new("RGB", (3, 1000)), "200 times"),
    ],
)
def test_what_cannot_be_seen_is_refused(source, says):
    with pytest.raises(PictureError, match=says):
        Picture.of(source)


def test_large_files_are_not_read(tmp_path, monkeypatch, drawn):
    monkeypatch.setattr(pictures, "MAX_BYTES", 10)
    (tmp_path / "a.png").write_bytes(png(drawn))
    for source in (tmp_path / "a.png", png(drawn), "data:image/png;base64," + "A" * 99):
        with pytest.raises(PictureError, match="MiB"):
            Picture.of(source)
    with pytest.raises((PictureError, MissingDependency)):
        Picture.video(png(drawn))


def test_all_frames_together_are_bounded(monkeypatch, drawn):
    monkeypatch.setattr(pictures, "MAX_TOTAL", 100)
    assert Picture.video([drawn] * 2).pixels == 96
    with pytest.raises(PictureError, match="million pixels together"):
        Picture.video([drawn] * 3)


def test_other_formats_are_refused(drawn):
    with pytest.raises(PictureError, match="PNG, JPEG"):
        Picture.of(png(drawn, "TIFF"))


def test_videos_are_frames_with_times(drawn):
    one = Picture.video([drawn, drawn.rotate(180), drawn], fps=4)
    assert one.times_s == (0.0, 0.25, 0.5)
    assert one.is_video
    assert repr(one) == "Picture(8x6, 3 frames)"
    assert Picture.video(one) is one
    assert Picture.video([drawn] * 3, fps=4).digest != one.digest
    assert len(Picture.video([drawn] * 100, max_frames=10).frames) == 10


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ([], {}, "at least one picture"),
        (5, {}, "at least one picture"),
        ([PIL.Image.new("RGB", (3, 3)), PIL.Image.new("RGB", (4, 3))], {}, "one size for all"),
        ([PIL.Image.new("RGB", (3, 3))], {"fps": 0}, "fps"),
        ([PIL.Image.new("RGB", (3, 3))], {"fps": True}, "fps"),
        ([PIL.Image.new("RGB", (3, 3))], {"max_frames": 0}, "max_frames"),
        ([7], {}, "frame 0"),
    ],
)
def test_videos_that_cannot_be_seen_are_refused(source, options, says):
    with pytest.raises(PictureError, match=says):
        Picture.video(source, **options)


def test_video_files(tmp_path, drawn, monkeypatch):
    try:
        import av
    except ImportError:
        with pytest.raises(MissingDependency, match="PyAV"):
            Picture.video(b"whatever")
        return
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as held:
        stream = held.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for i in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), 10 * i, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                held.mux(packet)
        for packet in stream.encode():
            held.mux(packet)
    one = Picture.video(path, fps=5)
    assert len(one.frames) == 10
    assert one.times_s[1] == pytest.approx(0.2)
    assert len(Picture.video(path.read_bytes(), fps=5, max_frames=4).frames) == 4
    with pytest.raises(PictureError, match="cannot be read"):
        Picture.video(b"no video")
    with monkeypatch.context() as low:
        low.setattr(pictures, "MAX_TOTAL", 5 * 1024)
        assert len(Picture.video(path, fps=2).frames) == 4
        with pytest.raises(PictureError, match="million pixels together"):
            Picture.video(path, fps=5)
    monkeypatch.setattr(pictures, "MAX_DECODED", 10 * 1024)  # frames that are left out count, too
    assert len(Picture.video(path, fps=1, max_frames=1).frames) == 1
    with pytest.raises(PictureError, match="billion pixels"):
        Picture.video(path, fps=0.5)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingDependency, match=r"exl2nb\[vision\]"):
        Picture.of(b"")
