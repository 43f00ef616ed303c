"""Value types shared by all packages: config, errors, requests, batches, devices. Imports nothing else of Sightline."""
