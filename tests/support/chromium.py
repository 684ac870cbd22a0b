"""A headless Chromium, driven over its DevTools pipe: no driver, no package."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
_FLAGS = (
    '--headless=new', '--remote-debugging-pipe', '--no-sandbox', '--disable-gpu', '--no-first-run',
    '--disable-dev-shm-usage', '--disable-background-networking', '--window-size=1400,900',
)  # fmt: skip


def find() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page; what its console said and what it asked the network for is in `events`."""

    def __init__(self, profile: Path) -> None:
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        command = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ['bash', '-c', command, find(), *_FLAGS, f'--user-data-dir={profile}', 'about:blank'],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self.events: list[dict] = []
        self._buffer, self._ids, self._session = b'', 0, None
        target = next(
            t for t in self.call('Target.getTargets')['targetInfos'] if t['type'] == 'page'
        )
        attached = self.call('Target.attachToTarget', targetId=target['targetId'], flatten=True)
        self._session = attached['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.call(f'{domain}.enable')

    def call(self, method: str, **params) -> dict:
        self._ids += 1
        message = {'id': self._ids, 'method': method, 'params': params}
        if self._session:
            message['sessionId'] = self._session
        os.write(self._write, json.dumps(message).encode() + b'\0')
        while True:
            answer = self._receive()
            if answer.get('id') == self._ids:
                assert 'error' not in answer, answer
                return answer['result']
            self.events.append(answer)

    def open(self, path: Path) -> None:
        self.call('Page.navigate', url=path.as_uri())
        while self.evaluate('document.readyState') != 'complete':
            time.sleep(0.05)

    def evaluate(self, expression: str):
        result = self.call('Runtime.evaluate', expression=expression, returnByValue=True)
        assert 'exceptionDetails' not in result, result
        return result['result'].get('value')

    def mouse(self, kind: str, x: float, y: float, **params) -> None:
        self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, **params)

    def silent(self) -> bool:
        """Whether the console said nothing, and nothing but one document was asked for."""
        noisy = 'Log.entryAdded', 'Runtime.consoleAPICalled', 'Runtime.exceptionThrown'
        self.evaluate('1')  # events of before come before its answer
        asked = [e for e in self.events if e['method'] == 'Network.requestWillBeSent']
        documents = [e['params']['type'] for e in asked]
        return documents == ['Document'] and not [e for e in self.events if e['method'] in noisy]

    def texts(self, selector: str) -> list[str]:
        found = f'[...document.querySelectorAll({json.dumps(selector)})]'
        return self.evaluate(f'{found}.map(each => each.innerText ?? each.textContent)')

    def click(self, selector: str) -> None:
        self.evaluate(f'document.querySelector({json.dumps(selector)}).click()')

    @contextlib.contextmanager
    def screen(self, width: int, scheme: str = '') -> Iterator[None]:
        """A screen of this width, and of a colour scheme, for a while."""
        sizes = {'width': width, 'height': 900, 'deviceScaleFactor': 1, 'mobile': False}
        media = [{'name': 'prefers-color-scheme', 'value': scheme}] if scheme else []
        self.call('Emulation.setDeviceMetricsOverride', **sizes)
        self.call('Emulation.setEmulatedMedia', features=media)
        try:
            yield
        finally:
            self.call('Emulation.clearDeviceMetricsOverride')
            self.call('Emulation.setEmulatedMedia', features=[])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)

    def _receive(self) -> dict:
        while b'\0' not in self._buffer:
            assert select.select([self._read], [], [], 60)[0], 'chromium did not answer in 60 s'
            chunk = os.read(self._read, 1 << 16)
            assert chunk, 'chromium ended'
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b'\0', 1)
        return json.loads(message)
