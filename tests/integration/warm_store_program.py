"""A process that builds a store's processor and then forks the store, which gets variables, secrets among them, from
stdin: a JSON object. The command line is that of `medialane store`."""

import json
import os
import sys

from medialane.cli import COMMANDS, main, parse_words, store
from medialane.cli.settings import given_settings
from medialane.config import load_config
from medialane.prepare import fork_forkserver
from medialane.runtime.linux import reserve_title


def run(words):
    reserve_title()
    args = parse_words("store", COMMANDS["store"], store.add_arguments, words)
    config = load_config(given_settings(args), file=args.config, sections=store.SECTIONS)
    store.prebuild(config, args.model, args.vllm_args, dict(os.environ))
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    fork_forkserver()
    os.environ.update(json.load(sys.stdin))
    return main(["store", *words])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
