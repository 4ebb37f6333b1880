"""Two processes that are about to make the same file, as two threads."""

import threading

from lintra.io.files import in_turn


def made_by_another(monkeypatch, module, look, path, made, call):
    """Return what `call` returns if another has its turn, and renames `made` to `path` once `call` has looked
    for that by `module.look` in vain."""
    looked, found, original = threading.Event(), [], getattr(module, look)

    def looking(*arguments):
        result = original(*arguments)
        looked.set()
        return result

    monkeypatch.setattr(module, look, looking)
    with in_turn(path):
        other = threading.Thread(target=lambda: found.append(call()))
        other.start()
        assert looked.wait(60)
        made.rename(path)
    other.join()
    (result,) = found
    return result
