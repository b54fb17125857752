# npm: a tool with about a hundred packages, with its cache in the tree.
export npm_config_cache=$PWD/cache npm_config_audit=false
export npm_config_fund=false npm_config_update_notifier=false

work() {
    mkdir app
    cd app
    npm init -y > said
    npm install eslint@8.57.1 > said 2>&1 || {
        cat said
        echo "npm install: it needs the npm registry"
        return 1
    }
    test "$(ls node_modules | wc -l)" -gt 50
    printf 'module.exports = { root: true, env: { node: true },\n' > .eslintrc.js
    printf '    extends: "eslint:recommended" };\n' >> .eslintrc.js
    printf 'module.exports = 1;\n' > good.js
    printf 'unheard(of);\n' > bad.js
    find node_modules -type f ! -path '*/.package-lock.json' -exec sha256sum {} + | sort > ../first
    # The same again, from the cache alone.
    rm -rf node_modules
    npm ci --offline > said 2>&1
    find node_modules -type f ! -path '*/.package-lock.json' -exec sha256sum {} + | sort |
        diff ../first -
}

holds() {
    cd app
    npm ls --all > said
    node_modules/.bin/eslint good.js
    fails node_modules/.bin/eslint bad.js > said
    grep -q no-undef said
    find node_modules -type f ! -path '*/.package-lock.json' -exec sha256sum {} + | sort |
        diff ../first -
    npm cache verify > said
    grep -q 'Content verified: [1-9]' said
}

more() {
    cd app
    npm uninstall --offline eslint > said 2>&1
    test ! -e node_modules/eslint
    rm -rf ../cache
}
