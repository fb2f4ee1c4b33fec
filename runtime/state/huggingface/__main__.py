"""Imports or exports weights: `python -P -m runtime.state.huggingface import|export`, for `dsc import hf` and `dsc
export hf`.

Stdin has the request in JSON (runtime/contract/weights.py). Stdout gets lines of progress, then the result. Exit codes:
0 done · 2 the weights cannot be used · 75 the same, for a temporary reason such as a full disk · 130 interrupted.
"""

from __future__ import annotations

import json
import sys

from runtime.contract.weights import Export, ImportRequest
from runtime.system.outcome import EXIT_USAGE, ReportedError, printable, refusal_code

EXIT_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    from runtime.state.huggingface.exporting import export_weights
    from runtime.state.huggingface.importing import write_checkpoint

    text = sys.stdin.buffer.read()
    try:
        result = (
            write_checkpoint(ImportRequest.from_json(text))
            if argv == ["import"]
            else export_weights(Export.from_json(text))
        )
    except KeyboardInterrupt:  # the calling command removes partial files
        return EXIT_INTERRUPTED
    except (ReportedError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        cause = error if isinstance(error, OSError) else error.__cause__
        return refusal_code(cause) if isinstance(cause, OSError) else EXIT_USAGE
    print(json.dumps({"result": result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
