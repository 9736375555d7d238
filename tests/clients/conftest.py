"""The servers of tests/e2e, which all clients ask the same."""


def pytest_configure(config):
    config.pluginmanager.import_plugin("shared_servers")
