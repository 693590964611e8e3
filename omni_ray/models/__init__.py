"""One folder per model family: declaration, processors, and the modules upstream lacks. Names no deployment."""
