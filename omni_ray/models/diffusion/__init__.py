"""Pictures from text: any text-to-image pipeline of diffusers, in one stage."""
