"""vLLM's processors of families whose checkpoints have no files of a Hugging Face processor."""


def without_files(processor):
    """Return the processor of a model that has none."""

    class Info(type(processor.info)):
        def get_hf_processor(self, **_options):
            raise OSError("there is no processor_config.json")

    return type(processor)(Info(processor.info.ctx), processor.dummy_inputs)
