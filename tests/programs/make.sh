# make: objects, a library and programs; only changed files are built again.
said_lines() { # what make does now, by number of commands
    make > said 2>&1 || { cat said; return 1; }
    grep -cE '^(cc|ar)' said || true
}

work() {
    mkdir src
    for n in $(seq 20); do
        printf '#include "all.h"\nint f%d(void) { return %d * FACTOR; }\n' "$n" "$n" > "src/f$n.c"
        printf 'int f%d(void);\n' "$n" >> src/all.h
    done
    echo '#define FACTOR 2' > src/factor.h
    echo '#include "factor.h"' >> src/all.h
    printf '#include <stdio.h>\n#include "all.h"\n' > main.c
    printf 'int main(void) { printf("%%d\\n", f3() + f20()); }\n' >> main.c
    cat > Makefile <<-'END'
	.RECIPEPREFIX := >
	OBJECTS := $(patsubst %.c,%.o,$(sort $(wildcard src/*.c)))
	main: main.o liball.a
	> cc -o $@ $^
	liball.a: $(OBJECTS)
	> ar rcs $@ $?
	%.o: %.c
	> cc -Isrc -MMD -c -o $@ $<
	-include $(OBJECTS:.o=.d) main.d
	END
    test "$(said_lines)" = 23
    test "$(./main)" = 46
    make -q
    # After a change of one source: its object, the archive and the program. After a change of the
    # header: all.
    echo 'int g(void) { return 0; }' >> src/f3.c
    fails make -q
    test "$(said_lines)" = 3
    echo '#define FACTOR 3' > src/factor.h
    test "$(said_lines)" = 23
    test "$(./main)" = 69
}

holds() {
    make -q
    test "$(./main)" = 69
    test "$(ar t liball.a | wc -l)" = 20
}

more() {
    echo '#define FACTOR 4' > src/factor.h
    make -j 4 > said
    test "$(./main)" = 92
    rm src/*.o
    touch -d '2001-01-01' src/f1.c
}
