from medialane.media.body import HeapBodies


def test_heap_body_equals_the_written_bytes():
    body = HeapBodies().open("image", "", 100)
    body.expect(6)
    body.write(b"abc")
    body.write(b"def")
    assert body.finish("hash") == b"abcdef"


def test_abandoned_heap_body_frees_its_bytes():
    body = HeapBodies().open("image", "", 100)
    body.write(b"abc")
    body.abandon()
    body.abandon()
    assert body.finish("hash") == b""
