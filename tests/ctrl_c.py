"""Ctrl-C, as the notebook's stop button sends it, at a random moment of some work. For scripts that tests run in processes of their own."""

import os
import signal
import threading
import time


class Presser:
    """Presses Ctrl-C at moments that `chance` (a random.Random) draws; `again`: how often once was not enough."""

    def __init__(self, chance):
        self.chance, self.again = chance, 0

    def interrupt(self, span, work):
        """Press after a random part of `span` seconds of `work`: True if that hit the work, False if it came after it."""
        caught, first, over = threading.Event(), self.chance.random() * span, False

        def press():
            time.sleep(first)
            os.kill(os.getpid(), signal.SIGINT)
            while not caught.wait(2):  # Python drops an interrupt that arrives inside a __del__: press again, as people do
                self.again += 1
                os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press, daemon=True)
        try:
            try:
                presser.start()
                work()
                over = True
                while True:
                    time.sleep(0.01)
            finally:
                caught.set()
        except KeyboardInterrupt:
            pass
        presser.join(5)
        return not over
